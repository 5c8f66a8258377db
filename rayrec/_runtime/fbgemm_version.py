"""Checks that torch and fbgemm_gpu fit together, before the native library is loaded.

A wrong pair fails in the loader with an undefined symbol; this error names the pair to install.
"""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("fbgemm-gpu-cpu", "fbgemm-gpu")


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split("+")[0].split(".")
    return int(major), int(minor)


def pair_error(torch_version: str, fbgemm: dict[str, str]) -> str | None:
    """The problem of the installed pair and what to install, or None.

    Args:
        torch_version: `torch.__version__`.
        fbgemm: Version of each installed fbgemm package, by name. fbgemm 1.X is built for torch 2.(X+5).
    """
    torch_major, torch_minor = _minor(torch_version)
    fbgemm_version = f"1.{torch_minor - 5}.0"
    if not fbgemm:
        return (
            "fbgemm_gpu is not installed: pip install 'rayrec[cpu]' or 'rayrec[cuda]' "
            f"(fbgemm {fbgemm_version} for this torch)"
        )
    if len(fbgemm) > 1:
        names = " and ".join(sorted(fbgemm))
        return (
            f"{names} are both installed and overwrite each other's files: "
            f"pip uninstall -y {' '.join(sorted(fbgemm))}, then install one of them again"
        )
    ((name, version),) = fbgemm.items()
    major, minor = _minor(version)
    if (torch_major, major, torch_minor) != (2, 1, minor + 5):
        return (
            f"torch {torch_version} and {name} {version} do not fit together: "
            f"pip install 'torch==2.{minor + 5}.*' '{name}=={version}', "
            f"or 'torch=={torch_version}' '{name}=={fbgemm_version}'"
        )
    return None


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_pair() -> None:
    """Raises ImportError with the pair to install if torch and fbgemm_gpu do not fit together."""
    torch_version = _installed_version("torch")
    if torch_version is None:
        raise ImportError("torch is not installed: pip install 'rayrec[cpu]' or 'rayrec[cuda]'")
    versions = {package: version for package in PACKAGES if (version := _installed_version(package))}
    if not versions:
        try:  # an unpacked wheel has no metadata
            import fbgemm_gpu

            versions = {"fbgemm-gpu": fbgemm_gpu.__version__}
        except (ImportError, AttributeError, OSError):
            pass
    problem = pair_error(torch_version, versions)
    if problem:
        raise ImportError(f"rayrec: {problem}")
