"""The fence's tables: their names, and the statements that `tricord fence ddl` prints."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import MetaData, create_engine, inspect

from coordinator.cli import main
from participant_sdk import ConfigurationError, FenceTables, metadata
from participant_sdk.fence_tables import DEFAULT

TRICORD = str(Path(sys.executable).with_name("tricord"))


def test_the_exported_metadata_holds_the_default_tables() -> None:
    assert set(metadata.tables) == {"tcc_fence_log", "tcc_fence_info"}
    assert DEFAULT.log is metadata.tables["tcc_fence_log"]


def test_they_fit_into_the_users_own_metadata() -> None:
    own = MetaData()
    tables = FenceTables("orders_fence", "orders_fence_info", "orders", metadata=own)
    assert set(own.tables) == {"orders.orders_fence", "orders.orders_fence_info"}
    assert tables.log.schema == "orders"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"log_name": ""}, "log_name '' is not 1 to 50 characters"),
        ({"info_name": "x" * 51}, "info_name 'x{51}' is not 1 to 50"),
        ({"log_name": "a", "info_name": "a"}, "log_name and info_name are both 'a'"),
        ({"metadata": metadata}, "log_name 'tcc_fence_log' is a table of that metadata already"),
    ],
)
def test_wrong_names(arguments: Any, error: str) -> None:
    with pytest.raises(ConfigurationError, match=error):
        FenceTables(**arguments)
    assert set(metadata.tables) == {"tcc_fence_log", "tcc_fence_info"}


def ddl(*arguments: str) -> str:
    """Standard output of the installed command."""
    done = subprocess.run([TRICORD, "fence", "ddl", *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_printed_statements_make_what_the_sdk_expects(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    with engine.begin() as db:
        for statement in ddl("--dialect", "sqlite").split(";"):
            if statement.strip():
                db.exec_driver_sql(statement)
        for table in metadata.sorted_tables:
            columns = [column["name"] for column in inspect(db).get_columns(table.name)]
            assert columns == [column.name for column in table.columns]
    engine.dispose()


@pytest.mark.parametrize("dialect", ["postgresql", "mariadb", "mysql", "sqlite"])
def test_ddl_of_other_names(dialect: str) -> None:
    names = ("--log-name", "fence", "--info-name", "fence_info", "--schema", "orders")
    printed = ddl("--dialect", dialect, *names)
    assert "CREATE TABLE orders.fence (" in printed
    assert "CREATE TABLE orders.fence_info (" in printed
    assert ("ENGINE=InnoDB" in printed) == (dialect in ("mariadb", "mysql"))


def test_bad_names_are_wrong_usage() -> None:
    result = CliRunner().invoke(main, ["fence", "ddl", "--dialect", "sqlite", "--log-name", "x" * 51])
    assert result.exit_code == 2
    assert "log_name" in result.output
    assert "50 characters" in result.output


def test_help_lists_the_commands_of_others() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert "fence" in result.output
    assert "serve" in result.output


def test_a_command_that_cannot_be_loaded_says_so_and_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    from coordinator.cli import plugins

    broken = EntryPoint("broken", "no_such_module:command", plugins.GROUP)
    monkeypatch.setattr(plugins, "_found", lambda: {"broken": broken})
    result = CliRunner().invoke(main, ["broken"])
    assert result.exit_code == 1
    assert "the command 'broken' cannot be loaded: ModuleNotFoundError" in result.output
    assert CliRunner().invoke(main, ["--help"]).exit_code == 0
