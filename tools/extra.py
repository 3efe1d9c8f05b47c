"""Print the requirements of one of the project's extras, one a line: `python tools/extra.py codegen`."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print("\n".join(project["optional-dependencies"][extra]))


if __name__ == "__main__":
    main(sys.argv[1])
