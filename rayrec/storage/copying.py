"""Copies and renames folders, also between file systems."""

from __future__ import annotations

from collections.abc import Collection

from rayrec.storage.folder import Folder
from rayrec.storage.parallel import in_threads

_BLOCK_BYTES = 16 << 20
_THREADS = 8


def copy_folder(source: Folder, target: Folder, last: Collection[str] = ()) -> None:
    """Copy all files of a folder and its subfolders, several at a time.

    Args:
        last: files to copy after all others, such as a manifest that marks the copy as complete.

    Raises:
        OSError: a file cannot be read or written.
    """
    sizes = source.files()

    def copy(path: str) -> None:
        above, _, name = path.rpartition("/")
        from_folder, to_folder = (source.sub(above), target.sub(above)) if above else (source, target)
        if not to_folder.copy_in_storage(from_folder, name, sizes[path]):
            _stream(from_folder, to_folder, name, sizes[path])

    for paths in (sizes.keys() - set(last), sizes.keys() & set(last)):
        for _ in in_threads(copy, sorted(paths), _THREADS):
            pass


def move_folder(source: Folder, target: Folder) -> None:
    """Rename a folder on one file system. Object storage has no renames: there the files are copied, then removed.

    Raises:
        OSError: the folder cannot be moved. An interrupted copy leaves the source complete.
    """
    if not source.rename(target):
        copy_folder(source, target)
        source.remove_all()


def _stream(source: Folder, target: Folder, name: str, size: int) -> None:
    block = memoryview(bytearray(min(size, _BLOCK_BYTES)))
    with source.open(name) as file, target.create(name) as out:
        for offset in range(0, size, _BLOCK_BYTES):
            view = block[: size - offset]
            if file.read_into(offset, view) < len(view):
                raise OSError(f"{source.path}/{name} became shorter while it was copied")
            out.write(view)
