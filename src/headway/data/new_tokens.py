"""Tokens that a run adds to its model's tokenizer, and the rows that they take in the model's embedding."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headway.errors import ConfigError
from headway.plugins import lays_out_packs

_SHOWN = 3  # tokens that an error names


class NewIds(NamedTuple):
    """Ids of new tokens.

    Attributes:
        ids: of the tokens, one after the other.
        rows: that the embedding needs [tokens].
    """

    ids: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class NewTokens:
    """Tokens to add, in this order.

    Attributes:
        words: such as <point>, which answers show.
        special: such as <|call|>, which are markup and left out where special tokens are.
    """

    words: tuple[str, ...] = ()
    special: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.words or self.special)

    def add_to(self, processor: Any, rows: int) -> NewIds:
        """Add the tokens to a tokenizer, which keeps them whole wherever they stand, and saves them.

        Tokens that the tokenizer has and the model has no row for are new to the model.

        Args:
            processor: of the model, or its tokenizer.
            rows: of the model's embedding [tokens].

        Raises:
            ConfigError: a token that the model has already, or one that the model lacks and that is not named.
        """
        tokenizer: Any = getattr(processor, "tokenizer", processor)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        new_tokens = (*self.words, *self.special)
        # Tokens of the tokenizer beyond the model's rows are new to the model, and must all be named.
        lacking = sorted((token for token, place in vocabulary.items() if place >= rows), key=vocabulary.__getitem__)
        if unnamed := [token for token in lacking if token not in new_tokens]:
            raise ConfigError(
                f"model.new_tokens: the tokenizer has {_listed(unnamed)} too, which the model has no row for. Name "
                "all such tokens, in model.new_tokens or model.new_special_tokens."
            )
        # A token with a row of its own has been trained; a second row would never be used.
        for token in new_tokens:
            if token not in lacking and self._is_known(tokenizer, token):
                raise ConfigError(
                    f"model.new_tokens: {token!r} is a token of the model already, so it cannot be added. Take it out."
                )
        # A tokenizer keeps what it says of a token, special or not; a contradiction would be lost on saving.
        is_special = {str(added): added.special for added in tokenizer.added_tokens_decoder.values()}
        for tokens, special in ((self.words, False), (self.special, True)):
            for token in tokens:
                if is_special.get(token, special) is not special:
                    right = "model.new_special_tokens" if is_special[token] else "model.new_tokens"
                    raise ConfigError(f"model.new_tokens: the tokenizer has {token!r} already: name it in {right}.")
            tokenizer.add_tokens([_added(token, special) for token in tokens if token not in vocabulary], special)
        # Each must come out of the tokenizer as one id, and the ids as rows at the end of the embedding.
        ids = tuple(sorted(tokenizer.convert_tokens_to_ids(token) for token in new_tokens))
        for token in new_tokens:
            if tokenizer.encode(token, add_special_tokens=False) != [tokenizer.convert_tokens_to_ids(token)]:
                raise ConfigError(
                    f"model.new_tokens: the tokenizer does not keep {token!r} as one token. Give one without white "
                    "space around it and without another token in it."
                )
        if ids != tuple(range(ids[0], ids[0] + len(ids))):
            raise ConfigError(
                f"model.new_tokens: the tokenizer gives {_listed(new_tokens)} the ids {ids}, which are not one after "
                "the other, so they cannot be rows at the end of an embedding. Add them to a copy of the model's "
                "folder."
            )
        return NewIds(ids, max(rows, ids[-1] + 1))

    @staticmethod
    def _is_known(tokenizer: Any, token: str) -> bool:
        if token in tokenizer.get_vocab():
            return True
        ids = tokenizer.encode(token, add_special_tokens=False)
        return len(ids) == 1 and ids[0] != tokenizer.unk_token_id


def _added(token: str, special: bool) -> Any:
    from transformers import AddedToken

    return AddedToken(token, special=special, normalized=False)  # found as it is written, whatever else is folded


def _listed(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens[:_SHOWN])) + (f" and {len(tokens) - _SHOWN} more" * (len(tokens) > _SHOWN))


def new_ids(model: str, tokens: NewTokens) -> NewIds:
    """Find the ids of new tokens in the vocabulary of a model.

    Args:
        model: a model folder, or a name on the Hub.
        tokens: at least one.

    Raises:
        ConfigError: as `NewTokens.add_to`, or a model whose family writes tokens of its own.
        UnknownModelError, CheckpointError: the model cannot be opened.
    """
    from headway.models.load import load_model_config, load_processor
    from headway.models.new_rows import embedding_rows

    config = load_model_config(model)
    if lays_out_packs(config):
        raise ConfigError(
            f"model.new_tokens cannot be added to a model of type {config.model_type!r}, whose family writes texts "
            "between tokens of its own. Leave them out."
        )
    return tokens.add_to(load_processor(model), embedding_rows(config))
