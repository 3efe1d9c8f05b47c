"""Generate the Python code of the contract beside its .proto files.

Runs in the environment of the `codegen` extra (`make protos`), never in the main one.
"""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent.parent / "protos"


def main() -> int:
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tricord/**/*.proto"))
    if not sources:
        print(f"no .proto files below {PROTOS}", file=sys.stderr)
        return 1
    for stale in PROTOS.glob("tricord/**/*_pb2*.py*"):
        if stale.suffix in {".py", ".pyi"}:
            stale.unlink()
    # The plug-ins of mypy-protobuf are scripts beside this interpreter.
    scripts = Path(sys.executable).parent
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={PROTOS}",
            f"--proto_path={files('grpc_tools') / '_proto'}",
            f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
            f"--python_out={PROTOS}",
            f"--grpc_python_out={PROTOS}",
            f"--mypy_out=quiet:{PROTOS}",
            f"--mypy_grpc_out=quiet:{PROTOS}",
            *sources,
        ]
    )
    for services in PROTOS.glob("tricord/**/*_pb2_grpc.py"):
        if "\nclass " not in services.read_text():  # the .proto file holds messages only
            services.unlink()
            services.with_suffix(".pyi").unlink(missing_ok=True)
    if code == 0:
        print(f"generated code for {len(sources)} .proto files")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
