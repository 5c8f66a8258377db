"""Which torch goes with which fbgemm_gpu, checked before the native library is loaded.

A wrong pair fails inside the loader with an undefined symbol; here it stops with the pair to install.
"""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("fbgemm-gpu-cpu", "fbgemm-gpu")


def _minor(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split("+")[0].split(".")
    return int(major), int(minor)


def pair_error(torch_version: str, fbgemm: dict[str, str]) -> str | None:
    """What is wrong with the installed pair, and what to install; None where it fits.

    Args:
        torch_version: as in `torch.__version__`.
        fbgemm: version of each installed fbgemm package, by name. fbgemm 1.X is built for torch 2.(X+5).
    """
    torch_major, torch_minor = _minor(torch_version)
    wanted = f"1.{torch_minor - 5}.0"
    if not fbgemm:
        return (
            f"fbgemm_gpu is not installed: pip install 'rayrec[cpu]' or 'rayrec[cuda]' (fbgemm {wanted} for this torch)"
        )
    if len(fbgemm) > 1:
        both = " and ".join(sorted(fbgemm))
        return (
            f"{both} are both installed and overwrite each other's files: "
            f"pip uninstall -y {' '.join(sorted(fbgemm))}, then install one of them again"
        )
    ((name, version),) = fbgemm.items()
    major, minor = _minor(version)
    if (torch_major, major, torch_minor) != (2, 1, minor + 5):
        return (
            f"torch {torch_version} and {name} {version} do not fit together: "
            f"pip install 'torch==2.{minor + 5}.*' '{name}=={version}', or 'torch=={torch_version}' '{name}=={wanted}'"
        )
    return None


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_pair() -> None:
    """Raises ImportError with the pair to install where torch and fbgemm_gpu do not fit together."""
    torch_version = _installed_version("torch")
    if torch_version is None:
        raise ImportError("torch is not installed: pip install 'rayrec[cpu]' or 'rayrec[cuda]'")
    found = {package: version for package in PACKAGES if (version := _installed_version(package))}
    if not found:
        try:  # an unpacked wheel without metadata, as on a machine that cannot install
            import fbgemm_gpu

            found = {"fbgemm-gpu": fbgemm_gpu.__version__}
        except (ImportError, AttributeError, OSError):
            pass
    problem = pair_error(torch_version, found)
    if problem:
        raise ImportError(f"rayrec: {problem}")
