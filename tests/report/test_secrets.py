"""Secrets are hidden in settings, texts and addresses alike, and what is none is shown."""

import json

import pytest
import yaml

from headway.data.samples import Origin, SampleError
from headway.data.sources import open_source
from headway.data.sources.opening import own_names
from headway.errors import DataError, HeadwayError
from headway.report.secrets import hide_secrets, without_secrets

S = "S3CR3TVALUE"
TEXTS = (
    f"https://user:p@{S}@host/x",
    f"https://{S}@host/x",
    f"mlflow:postgresql://u:p:{S}@h/db",
    f"https://u:{S}/more@host/x",
    f"https://b.s3.amazonaws.com/x?X-Amz-Credential={S}&X-Amz-Signature={S}&X-Amz-Security-Token={S}",
    f"https://storage.googleapis.com/b/x?GoogleAccessId={S}&X-Goog-Signature={S}",
    f"https://a.blob.core.windows.net/x?sv=2020&sig={S}",
    f"https://x.cloudfront.net/a?Policy={S}&Key-Pair-Id={S}&Signature={S}",
    f"https://hooks.slack.com/services/T0/B0/{S}",
    f"WANDB_API_KEY={S}",
    f"WANDB_API_KEY = {S}",
    f"WANDB_API_KEY='{S}'",
    f'export HF_TOKEN="{S} {S}"',
    f"password: {S}",
    f'a body of {{"api_key": "{S}", "x": 1}}',
    f"api_keys: [{S}, {S}]",
    f"db_pass={S}",
    f"pwd: {S}",
    f"Authorization: Bearer {S}",
    f"'Authorization': 'token {S}'",
    f"headway train --hub-token {S} --password={S}",
    f"the token {S} was refused",
    f"password {S}, then",
    f"hf_{S}",
    f"eyJhbGciOiJIUzI1NiJ9.{S}.abc",
    f"-----BEGIN RSA PRIVATE KEY-----\n{S}\n-----END RSA PRIVATE KEY-----",
)
SETTINGS = (
    f"pwd: {S}",
    f"db_pass: {S}",
    f"github_pat: {S}",
    f"key: {S}",
    f"api_keys: [{S}]",
    f"auth_tokens: [{S}]",
    f"options: [[token, {S}]]",
    f"env_vars: [{{name: API_KEY, value: {S}}}]",
    f"client_kwargs: {{aws_session: {S}}}",
    f"path: file:///home/{S}/x",
    f"path: /data/home/{S}/x",
    f"path: file:///mnt/users/Users/{S}",
    f"note: ask {S}@corp.example.com",
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_secret_is_hidden_in_every_text_that_leaves(text):
    assert S not in hide_secrets(text)
    assert S not in str(HeadwayError(f"cannot read {text}"))
    assert S not in str(SampleError(Origin(text, text, 1, "line 1"), text))
    for form in (yaml.safe_dump, json.dumps):
        assert S not in without_secrets(form({"note": text}), longest=10_000)


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_secret_is_hidden_under_every_name_that_tells_one(settings):
    assert S not in without_secrets(settings, longest=10_000)
    assert S not in without_secrets(json.dumps(yaml.safe_load(settings)), longest=10_000)


@pytest.mark.parametrize(
    "text",
    [
        "data.tokens_per_pack=4096 and max_new_tokens=64",
        "end_token=50256, eos_token=<|im_end|>",
        "hf://datasets/me/rows@main/train.parquet",
        "https://host:8484/a@b",
        "the token is not in the vocabulary; one pass: of the data",
        "/home/me/data.jsonl, line 3",
        "token 151645 and token Qwen2Tokenizer; the key projection",
    ],
)
def test_what_is_no_secret_is_shown_in_errors(text):
    assert str(HeadwayError(text)) == text


@pytest.mark.parametrize(
    "settings",
    [
        "path: https://host/home/x.jsonl",
        "path: git@github.com:me/rows",
        "path: hf://datasets/me/rows@v1.com/a",
        "a: b@v1.0",
        "token_dtype: uint16",
        "end_token: 2",
    ],
)
def test_what_names_nobody_is_shown_in_settings(settings):
    assert without_secrets(settings, longest=99) == settings


@pytest.mark.parametrize(
    "piece",
    [
        "/a",
        " /a",
        "/a/home",
        "a@",
        "a.",
        "token ",
        "token 1a",
        "a-",
        "://a",
        "://a:",
        "?a",
        "&sig=",
        "token=",
        "password",
    ],
)
def test_a_text_of_megabytes_is_shown_cut_before_it_is_searched(piece):
    """The patterns would take hours: some are tried from each place on."""
    text = "line 3: got " + piece * (3_000_000 // len(piece))
    shown = str(HeadwayError(text))
    assert shown.startswith("line 3: got ")
    assert f"({len(text):,} characters)" in shown
    assert "too much" in without_secrets(f"a: {text}", longest=99)


def test_a_secret_at_the_cut_is_not_shown_by_half():
    for before in range(9_970, 10_010):
        assert S[:4] not in hide_secrets("x" * before + f" https://user:{S}@host/x " + "y" * 100)


def test_a_signature_is_neither_a_name_nor_an_extension():
    signed = f"https://h/b/t.jsonl?X-Amz-Signature=ab/{S}.x"
    assert own_names([signed, "other.jsonl"]) == ["t", "other"]
    assert own_names([signed, f"https://h/c/t.jsonl?sig=de/{S}.y"]) == ["b/t", "c/t"]
    assert S not in "".join(own_names([signed, f"https://h/b/t.parquet?sig={S}"]))
    assert S not in "".join(own_names([f"https://u:{S}@h/t.jsonl", f"https://u:{S}@i/t.jsonl", f"s3://{S}@h"]))


def test_the_format_of_a_signed_address_is_told_by_its_path(tmp_path):
    from functools import partial
    from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    (tmp_path / "t.jsonl").write_text('{"text": "a"}\n')

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tmp_path)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        source = open_source(f"http://127.0.0.1:{server.server_port}/t.jsonl?X-Amz-Signature=ab/{S}.x")
        (shard,) = source.shards
        assert (source.name, shard.reader.file.name) == ("t", "t.jsonl")
        assert shard.reader.file.stamp.startswith("last-modified=")
        assert [sample.content for _, sample in shard.rows()] == ["a"]
        with pytest.raises(DataError) as refused:
            open_source(f"http://user:{S}@127.0.0.1:{server.server_port}/none.jsonl?sig={S}")
        assert S not in str(refused.value)
        server.shutdown()
