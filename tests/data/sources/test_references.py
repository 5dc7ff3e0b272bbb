"""What rows may name, and what they may not."""

import os

import pytest

from headway.data import Media
from headway.data.sources import open_source, references
from headway.data.sources.references import MediaRules, RowMedia, below, inline_bytes
from headway.errors import DataError


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root" / "in").mkdir(parents=True)
    (tmp_path / "root" / "in" / "a.png").write_bytes(b"a")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return tmp_path / "root"


def named(folder, value, **rules):
    return RowMedia({}, {}, str(folder), MediaRules(**rules)).named("image", value).media


@pytest.mark.parametrize("name", ["in/a.png", "./in//a.png", "in/../in/a.png"])
def test_paths_below_the_root_are_read(root, name):
    assert named(root, name).read() == b"a"


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "in/../../secret.png",
        "..",
        "",
        "/etc/passwd",
        "{root}/../secret.png",
        "..\\secret.png",
        "a\0.png",
    ],
)
def test_paths_that_leave_the_root_are_refused(root, name):
    with pytest.raises(DataError, match=r"leaves the dataset's folder|is absolute"):
        named(root, name.format(root=root))


def test_links_may_stay_below_the_root_but_not_leave_it(root):
    (root / "inner.png").symlink_to("in/a.png")
    (root / "outer.png").symlink_to("../secret.png")
    (root / "folder").symlink_to("..")
    assert named(root, "inner.png").read() == b"a"
    for name in ("outer.png", "folder/secret.png"):
        with pytest.raises(DataError, match=r"leaves the dataset's folder .* by a link, to .*secret\.png"):
            named(root, name)
    (root.parent / "linked").symlink_to(root)  # a root may be a link itself
    assert named(root.parent / "linked", "in/a.png").read() == b"a"


def test_a_root_that_is_the_working_folder_is_told_from_a_full_stop(root, monkeypatch):
    monkeypatch.chdir(root)
    with pytest.raises(DataError, match=r"root, the folder '\.'\. Paths start from there"):
        RowMedia({}, {}, ".", MediaRules()).named("image", "/etc/passwd")


def test_another_root_may_be_given(root):
    assert named(root / "in", "in/a.png", root=str(root)).read() == b"a"
    assert named(root, "in/a.png", root="memory://bucket/data/") == Media("memory://bucket/data/in/a.png")
    with pytest.raises(DataError, match="leaves"):
        named(root, "../a.png", root="memory://bucket/data")


@pytest.mark.parametrize("url", ["http://a/b.png", "HTTPS://a/b.png", "s3://bucket/b.png"])
def test_remote_media_are_off_unless_allowed(root, url):
    with pytest.raises(DataError, match=r"lies outside the dataset, .* allow_remote=True"):
        named(root, url)
    assert named(root, url, allow_remote=True) == Media(url)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "local:///etc/passwd", "zip://a::http://b/c.zip", "http://a::file:///etc/passwd"]
)
def test_protocols_that_reach_this_machine_are_never_allowed(root, url):
    with pytest.raises(DataError, match="has a protocol that rows may not use"):
        named(root, url, allow_remote=True)


def test_data_uris_are_decoded_and_bounded(monkeypatch):
    assert inline_bytes("image", "data:image/png;base64,SGk=") == b"Hi"
    assert inline_bytes("image", "data:,a%20b") == b"a b"
    for uri in ("data:image/png;base64,SGk", "data:image/png;base64,S G!", "data:image/png;base64"):
        with pytest.raises(DataError, match="cannot be decoded"):
            inline_bytes("image", uri)
    monkeypatch.setattr(references, "MAX_INLINE_BYTES", 12)
    assert len(inline_bytes("image", "data:;base64," + "SGkh" * 4)) == 12
    with pytest.raises(DataError, match="has 20 characters"):
        inline_bytes("image", "data:;base64," + "SGkh" * 5)


def test_a_missing_file_is_named(root):
    with pytest.raises(
        DataError, match=r"the video 'b\.mp4' does not exist in the folder .*root'\. Put the file there"
    ):
        below(str(root), "video", "b.mp4")


def test_a_dataset_names_the_row_whose_image_leaves_it(root):
    os.link(root.parent / "secret.png", root / "linked.png")  # a hard link is the file itself
    rows = ['{"text": "a", "image": "linked.png"}', '{"text": "a", "image": "../secret.png"}']
    (root / "a.jsonl").write_text("\n".join(rows))
    source = open_source(root / "a.jsonl")
    assert source[0].images[0].read() == b"secret"
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: the image path '\.\./secret\.png' leaves"):
        source[1]
    (root / "a.jsonl").write_text('{"text": "a", "image": "secret.png"}')
    assert open_source(root / "a.jsonl", root=root.parent)[0].images[0].read() == b"secret"


def test_members_must_be_there():
    media = RowMedia({}, {"x.0.png": b"a"}, ".", MediaRules())
    with pytest.raises(DataError, match=r"the image '1\.png' is not stored with the sample, which holds x\.0\.png"):
        media.named("image", "1.png")


def test_an_absolute_path_within_the_root_is_read(root, tmp_path):
    (tmp_path / "link").symlink_to(root)
    assert named(root, str(root / "in/a.png")).read() == b"a"
    assert named(tmp_path / "link", str(tmp_path / "link/in/a.png")).read() == b"a"
    assert named(tmp_path / "link", str(root / "in/a.png")).read() == b"a"
    with pytest.raises(DataError, match=r"is absolute and leads elsewhere .* open the dataset with another root"):
        named(root, f"{root}2/in/a.png")
