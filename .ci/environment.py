"""Make .venv from lock files, or link it from one that was made from the same files before: ``make install``.

    python .ci/environment.py requirements.lock [requirements-deepspeed.lock ...]

An environment is kept in the user's cache under a digest of everything that it was made from: the lock files, how they
are installed, and the Python. A changed lock is another environment, so a missing package is missing here too.
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainbus" / "environments"
#: DeepSpeed's build looks for torch, and must not compile anything on a machine without a GPU.
ENVIRONMENT = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
#: The oldest are removed: an environment has some gigabytes.
MAX_KEPT = 4


def key_of(locks: list[str]) -> str:
    """Return the digest of everything that an environment is made from."""
    digest = hashlib.sha256(f"{sys.version} {sys.executable} {platform.platform()}".encode())
    for path in (Path(__file__), *(ROOT / lock for lock in locks)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def install(locks: list[str]) -> None:
    """Install the locks into .venv with plain pip, one after the other."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    for number, lock in enumerate(locks):
        # The build of an extra looks for what the first lock has.
        isolation = ["--no-build-isolation"] if number else []
        pip("install", "--no-compile", *isolation, "-r", str(ROOT / lock))
    # On every core, which pip does not; some packages have files for other versions of Python.
    compile_all = [VENV / "bin" / "python", "-m", "compileall", "-qq", "-j", "0", VENV / "lib"]
    subprocess.run(compile_all, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def pip(*arguments: str) -> None:
    command = [VENV / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    subprocess.run(command, check=True, cwd=ROOT, env=os.environ | ENVIRONMENT)


def link(source: Path, target: Path) -> None:
    """Copy a folder by hard links, or by content where it lies on another file system; whole or not at all."""
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)

    def link_file(file: str, to: str) -> str:
        try:
            os.link(file, to)
        except OSError:
            shutil.copy2(file, to)
        return to

    shutil.copytree(source, partial, symlinks=True, copy_function=link_file)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def move_scripts(made_in: str) -> None:
    """Let the scripts of a linked environment name this one, each as a new file: the linked ones are shared."""
    for path in (VENV / "bin").iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        content = path.read_bytes()
        if made_in.encode() in content:
            mode = path.stat().st_mode
            path.unlink()
            path.write_bytes(content.replace(made_in.encode(), str(VENV).encode()))
            path.chmod(mode)


def keep(kept: Path) -> None:
    """Put .venv into the cache. A full disk or a read-only home costs the next clone its time, and nothing else."""
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        link(VENV, kept)
        (kept / "made-in").write_text(str(VENV))
        for old in sorted(CACHE.iterdir(), key=lambda path: path.stat().st_mtime)[:-MAX_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        print(f"the environment is not kept for other clones: {error}", file=sys.stderr)


def main() -> None:
    locks = sys.argv[1:]
    kept = CACHE / key_of(locks)
    if (kept / "made-in").exists():
        link(kept, VENV)
        move_scripts((kept / "made-in").read_text())
        os.utime(kept)
        print(f"linked .venv from {kept}")
    else:
        install(locks)
        keep(kept)
    pip("install", "--no-deps", "--no-build-isolation", "-e", ".")


if __name__ == "__main__":
    main()
