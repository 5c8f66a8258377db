"""Runs a script as the main module, with `import torchrec` meaning `rayrec.torchrec`.

In spawned processes, multiprocessing imports the main module again, by the name in its `__spec__`. That name is this
module's, so these processes also install the alias, and then run the script as `__mp_main__`.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from rayrec.torchrec.alias import install

SCRIPT = "RAYREC_TORCHREC_SCRIPT"  # environment variable with the path of the script, for spawned processes


def run(path: str) -> None:
    """Runs a script like `python path`; `sys.argv` holds its arguments. Exceptions of the script propagate.

    Raises:
        OSError: the file cannot be read.
    """
    code = _compiled(path)
    install()
    os.environ[SCRIPT] = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    main: Any = ModuleType("__main__")
    main.__file__, main.__builtins__ = path, builtins
    main.__spec__ = importlib.util.find_spec("rayrec.torchrec.script")
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _compiled(path: str) -> Any:
    with open(path, "rb") as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


if __name__ == "__mp_main__":
    install()
    sys.argv[0] = __file__ = os.environ[SCRIPT]
    exec(_compiled(__file__))
