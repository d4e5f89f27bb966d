"""Pointer files of DVC, and the hash of a folder, as DVC has them."""

from __future__ import annotations

import yaml

from contracts.dvc import TrackedFile, hash_folder, pointer_content, read_pointer

#: Files, the MD5 under which ``dvc add`` of DVC 3.67.1 keeps each, and what it gives a folder with them.
DVC_3_67_1 = {
    "model-0.safetensors": (b"weights\n", "fad624b28208abf62b4d0db65c04757b"),
    "empty": (b"", "d41d8cd98f00b204e9800998ecf8427e"),
    "rank0/dos.txt": (b"line one\r\nline two\r\n", "a775daabdb44c57a65eaadeef4edfe51"),
    "rank0/nested/deep.bin": (b"deep", "6627415e807ee33c7302917216e7da68"),
    "ünï code/größe.bin": (b"umlaut", "e4f7981a7e3b887516e863b95c969e50"),
    "a\"b'c.txt": (b"quote", "7a674c327bfa07f7c1204fb38ca6ef3b"),
    "x: y #z.txt": (b"yaml", "6eedc03a68a69933c763e674f2d7c42f"),
    "back\\U0001f600slash": (b"backslash", "c57aeddaffce62fead6be61022eb1340"),
    # DVC refused this name as two surrogates, in which JSON has it.
    "📦/😀.bin": (b"emoji", "ba323c3f5b3f1b536461d41cc7f1ba60"),
}
FOLDER = "f946614b16c83f7004437610dff31917.dir"
FILES = [TrackedFile(path, md5, len(content)) for path, (content, md5) in DVC_3_67_1.items()]


def test_a_pointer_is_read_as_it_was_written_and_as_yaml_reads_it() -> None:
    content = pointer_content(FILES)
    assert read_pointer(content) == FILES
    outs = yaml.safe_load(content)["outs"]
    assert [(out["path"], out["md5"], out["size"]) for out in outs] == FILES


def test_a_folder_has_the_hash_that_dvc_gives_it() -> None:
    assert hash_folder(reversed(FILES)) == FOLDER


def test_what_is_no_pointer_names_no_files() -> None:
    assert read_pointer(b"outs:\n- md5: nonsense\n") == []
