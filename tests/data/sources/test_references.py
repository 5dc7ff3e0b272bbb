"""What rows may name, and what they may not."""

import base64
import io
import os

import pytest
from PIL import Image

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


@pytest.mark.parametrize("link", [False, True])
def test_the_file_system_is_asked_once_for_a_file_of_a_known_folder(root, link, monkeypatch):
    """Rows are read again in every epoch, and on a network's file system each question is a way there and back."""
    folder = root / "deep" / "er" / "still"
    folder.mkdir(parents=True)
    for name in "abc":
        (folder / f"{name}.png").write_bytes(b"a")
    if link:
        (root.parent / "linked").symlink_to(root)
        root = root.parent / "linked"
    named(root, "deep/er/still/a.png")
    asked = []
    for name in ("stat", "lstat", "readlink"):
        function = getattr(os, name)
        monkeypatch.setattr(os, name, lambda path, *a, _f=function, **k: asked.append(str(path)) or _f(path, *a, **k))
    for name in "bc":
        named(root, f"deep/er/still/{name}.png")
    monkeypatch.undo()
    assert [path[-5:] for path in asked] == ["b.png", "c.png"]


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


@pytest.mark.parametrize("url", ["local:///etc/passwd", "zip://a::http://b/c.zip", "http://a::file:///etc/passwd"])
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


def test_file_uris_below_the_root_are_paths_and_others_are_refused(root, tmp_path):
    (root / "in" / "b c.png").write_bytes(b"b")
    (root / "in" / "d%20e.png").write_bytes(b"d")
    assert named(root, f"file://{root}/in/a.png").read() == b"a"  # as Qwen's documentation has it
    assert named(root, "FILE://in/a.png").read() == b"a"
    assert named(root, (root / "in/b c.png").as_uri()).read() == b"b"  # escaped, by Python
    assert named(root, "file://in/d%20e.png").read() == b"d"
    for uri in ("file:///etc/passwd", "file://../secret.png", f"file://{tmp_path}/secret.png", "file:///%2Fetc/passwd"):
        with pytest.raises(DataError, match=r"leaves the dataset's folder|is absolute"):
            named(root, uri, allow_remote=True)
    with pytest.raises(DataError, match="is absolute"):
        named(root, "file:///etc/passwd", root="memory://bucket")


def picture(form, size=(6, 4), **options):
    file = io.BytesIO()
    Image.effect_noise(size, 100).convert("RGB").save(file, form, **options)
    return file.getvalue()


PNG = picture("PNG")
BASE64 = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "value",
    [
        BASE64,
        base64.encodebytes(PNG).decode(),
        {"base64": BASE64},
        {"bytes": BASE64, "path": "a.png"},
        {"type": "base64", "media_type": "image/png", "data": BASE64},
        {"url": f"data:image/png;base64,{BASE64}", "detail": "high"},
        {"bytes": None, "path": f"data:image;base64,{BASE64}"},
        {"source": {"type": "base64", "media_type": "image/png", "data": BASE64}},
    ],
)
def test_bytes_within_a_row_are_read_in_every_form(root, value):
    assert named(root, value).read() == PNG
    assert RowMedia({"images": [value]}, {}, str(root), MediaRules()).next("image").media.read() == PNG


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM"])
def test_bare_base64_of_every_kind_of_picture_is_told_from_a_path(root, form):
    content = picture(form)
    assert named(root, base64.b64encode(content).decode()).read() == content


@pytest.mark.parametrize("name", ["a" * 64, "iVBORw0KGgo" * 8 + ".png", "in/" * 30 + "a", BASE64[:40], "Qk" + "/" * 70])
def test_a_path_of_letters_alone_is_no_base64(root, name):
    with pytest.raises(DataError, match=r"does not exist|cannot be decoded|not base64"):
        named(root, name)


def test_damaged_base64_is_told_without_its_bytes(root, monkeypatch):
    for value in (BASE64[:-3], {"base64": "b'\\x89PNG'"}, {"bytes": "\ud800" * 99}):
        with pytest.raises(DataError, match=r"characters that are not base64 \(.*Write its bytes in base64") as caught:
            named(root, value)
        assert len(str(caught.value)) < 300
    monkeypatch.setattr(references, "MAX_INLINE_BYTES", 12)
    with pytest.raises(DataError, match="at most 0 MiB are read"):
        named(root, BASE64)


def test_frames_of_a_video_are_a_list_a_column_or_a_folder(root):
    for number in (10, 9, 1):
        (root / "in" / f"f{number}.jpg").write_bytes(b"%d" % number)
    (root / "in" / "a.png").unlink()
    (root / "in" / "notes.txt").write_text("no frame")
    names = [f"in/f{number}.jpg" for number in (1, 9, 10)]

    def columns(**fields):
        media = RowMedia(fields, {}, str(root), MediaRules())
        return [[frame.read() for frame in part.media.frames] for part in media.rest()]

    frames = [b"1", b"9", b"10"]
    assert columns(video=names) == columns(videos=names) == columns(videos=[names]) == [frames]
    assert columns(videos=[names, names[:1]]) == [frames, [b"1"]]
    assert columns(video="in") == columns(videos=["in/"]) == columns(videos=[f"file://{root}/in"]) == [frames]
    assert columns(videos=[[{"path": names[0]}, "data:,9"]]) == [[b"1", b"9"]]
    for name in ("..", "/etc", "in/.."):
        with pytest.raises(DataError, match=r"leaves the dataset's folder|is absolute|is a folder without pictures"):
            columns(videos=[name])
    with pytest.raises(DataError, match=r"'in/f2\.jpg' does not exist"):
        columns(videos=[["in/f2.jpg"]])


def test_animations_in_a_column_are_videos_of_their_own(root):
    for name in ("a.gif", "b.gif"):
        (root / name).write_bytes(b"GIF8")
    media = RowMedia({"videos": ["a.gif", "b.gif"]}, {}, str(root), MediaRules())
    assert [media.next("video").media.frames, media.next("video").media.frames] == [(), ()]


def test_frames_that_are_members_wait_no_longer():
    media = RowMedia({}, {"x.0.png": b"a", "x.1.png": b"b"}, ".", MediaRules())
    media.named("video", ["0.png", "1.png"])
    media.finish()
