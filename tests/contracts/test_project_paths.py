"""From which folders of a project its modules are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.project_paths import find_import_folders, find_local_projects

PYPROJECT = '[project]\nname = "p"\nversion = "1"\n'


@pytest.mark.parametrize(
    ("files", "folders"),
    [
        pytest.param({"train.py": ""}, ["."], id="plain"),
        pytest.param({"pyproject.toml": PYPROJECT, "src/p/__init__.py": ""}, [".", "src"], id="src layout"),
        pytest.param({"setup.py": "", "src/p/__init__.py": ""}, [".", "src"], id="src layout of setup.py"),
        pytest.param({"src/p/__init__.py": ""}, ["."], id="no project"),
        pytest.param({"pyproject.toml": PYPROJECT, "src/__init__.py": ""}, ["."], id="a package named src"),
        pytest.param({"requirements.txt": "-e .\n", "setup.py": "", "src/p.py": ""}, [".", "src"], id="itself"),
        pytest.param(
            {
                "requirements.txt": "emoji\n-e libs/a[x]  # ours\n./libs/b\n",
                "libs/a/setup.py": "",
                "libs/a/src/a.py": "",
                "libs/b/b.py": "",
            },
            [".", "libs/a/src", "libs/b"],
            id="parts",
        ),
        pytest.param(
            {
                "requirements.txt": "-r more/all.txt\n",
                "more/all.txt": "--editable ./libs\n-r all.txt\n",
                "libs/a.py": "",
            },
            [".", "libs"],
            id="included",
        ),
        pytest.param({"requirements.txt": "-e ../other\n-e /\n-e absent\n./a.whl\n"}, ["."], id="outside or absent"),
        pytest.param(
            {
                "pyproject.toml": '[tool.uv.sources]\na = { path = "libs/a" }\nc = { git = "https://git.test" }\n'
                '[tool.uv.workspace]\nmembers = ["packages/*"]\n',
                "libs/a/a.py": "",
                "packages/b/pyproject.toml": PYPROJECT,
                "packages/b/src/b.py": "",
            },
            [".", "libs/a", "packages/b/src"],
            id="uv",
        ),
        pytest.param({"pyproject.toml": "[tool\n", "a.py": ""}, ["."], id="broken"),
        pytest.param({"pyproject.toml": "tool = 3\n", "a.py": ""}, ["."], id="odd"),
    ],
)
def test_folders_of_a_project(tmp_path: Path, files: dict[str, str], folders: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [str(path.relative_to(tmp_path)) for path in find_import_folders(tmp_path)] == folders


def test_a_link_out_of_the_project_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    project = tmp_path / "project"
    project.mkdir()
    (project / "link").symlink_to("../outside")
    (project / "requirements.txt").write_text("-e link\n")
    assert find_local_projects(project) == []
