"""The generated code is what the .proto files say: descriptors built by buf against those in the _pb2 modules."""

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
SOURCES = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("tricord/**/*.proto"))


def build(protos: Path) -> dict[str, FileDescriptorProto]:
    """The descriptors of the .proto files below a folder."""
    buf = Path(sys.executable).with_name("buf")
    command = [str(buf), "build", "--as-file-descriptor-set", "--exclude-source-info", "-o", "-", str(protos)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert built.returncode == 0, built.stderr.decode()
    files = FileDescriptorSet.FromString(built.stdout).file
    return {file.name: without_defaults(file) for file in files}


def generated(source: str) -> FileDescriptorProto:
    """The descriptor that the committed _pb2 module carries."""
    module = import_module(source.removesuffix(".proto").replace("/", ".") + "_pb2")
    return without_defaults(FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb))


def without_defaults(file: FileDescriptorProto) -> FileDescriptorProto:
    """protoc and buf both may write down a field's JSON name; it follows from the name."""
    messages = list(file.message_type)
    while messages:
        message = messages.pop()
        messages.extend(message.nested_type)
        for field in message.field:
            field.ClearField("json_name")
    return file


@pytest.fixture(scope="module")
def built() -> dict[str, FileDescriptorProto]:
    return build(PROTOS)


@pytest.mark.parametrize("source", SOURCES)
def test_generated_code_is_current(source: str, built: dict[str, FileDescriptorProto]) -> None:
    assert generated(source) == built[source], f"{source} has changed: run `make protos`"


@pytest.mark.parametrize("source", SOURCES)
def test_stubs_and_services_are_generated_beside_the_source(source: str) -> None:
    stem = PROTOS / source.removesuffix(".proto")
    assert Path(f"{stem}_pb2.pyi").exists()
    descriptor = generated(source)
    services = Path(f"{stem}_pb2_grpc.py")
    stubs = Path(f"{stem}_pb2_grpc.pyi")
    assert services.exists() == stubs.exists() == bool(descriptor.service)
    for service in descriptor.service:
        for text in (services.read_text(), stubs.read_text()):
            assert f"class {service.name}Stub" in text
            assert f"class {service.name}Servicer" in text
            assert all(f"{method.name}" in text for method in service.method)


def test_no_generated_file_outlives_its_source() -> None:
    found = {str(path.relative_to(PROTOS)) for path in PROTOS.glob("tricord/**/*_pb2.py")}
    assert found == {source.replace(".proto", "_pb2.py") for source in SOURCES}


def test_the_comparison_sees_a_changed_field(tmp_path: Path) -> None:
    """The check above can fail: one more field in one file, and only that file differs."""
    for source in SOURCES:
        copy = tmp_path / source
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text((PROTOS / source).read_text())
    changed = tmp_path / SOURCES[0]
    changed.write_text(changed.read_text() + "\nmessage Added {\n  string added = 1;\n}\n")
    differs = [source for source, file in build(tmp_path).items() if source in SOURCES and generated(source) != file]
    assert differs == [SOURCES[0]]
