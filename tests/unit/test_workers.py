"""Workers: what deaths lead to, and who may have an address."""

import socket
from pathlib import Path

import pytest

from coordinator.config import ConfigError, load
from coordinator.listening import HeldPort
from coordinator.workers import AT_ONCE_MAX, AT_ONCE_S, PAUSE_S_MAX, PAUSE_S_MIN, SETTLED_S, Deaths, Ending
from tests.coordinators import tricord

ON_POSTGRES = "postgresql://tricord@db/tricord"


class TestDeaths:
    def test_pauses_grow_up_to_a_limit(self) -> None:
        deaths = Deaths()
        pauses_s = [deaths.add(Ending(-9, AT_ONCE_S)) for _ in range(20)]
        assert PAUSE_S_MIN / 2 <= pauses_s[0] <= PAUSE_S_MIN
        assert PAUSE_S_MAX / 2 <= min(pauses_s[-5:]) <= max(pauses_s[-5:]) <= PAUSE_S_MAX
        assert not deaths.hopeless

    def test_who_has_served_for_long_begins_anew(self) -> None:
        deaths = Deaths()
        for _ in range(10):
            deaths.add(Ending(-9, AT_ONCE_S))
        assert deaths.add(Ending(-9, SETTLED_S)) <= PAUSE_S_MIN

    @pytest.mark.parametrize("served_s", [None, 0.0, AT_ONCE_S / 2])
    def test_who_dies_at_once_again_and_again_is_given_up(self, served_s: float | None) -> None:
        deaths = Deaths()
        for number in range(1, AT_ONCE_MAX + 1):
            deaths.add(Ending(1, served_s))
            assert deaths.hopeless is (number == AT_ONCE_MAX)

    def test_in_a_row_only(self) -> None:
        deaths = Deaths()
        for _ in range(3):
            for _ in range(AT_ONCE_MAX - 1):
                deaths.add(Ending(1, None))
            deaths.add(Ending(-11, AT_ONCE_S))
            assert not deaths.hopeless

    def test_a_store_that_is_away_is_waited_for(self) -> None:
        deaths = Deaths()
        for _ in range(50):
            deaths.add(Ending(1, None, "the store cannot be reached", passing=True))
        assert not deaths.hopeless

    def test_how_it_ended_is_told(self) -> None:
        assert str(Ending(3, 1.0)) == "exit code 3"
        assert str(Ending(-11, None)) == "killed by SIGSEGV"
        assert str(Ending(-45, None)) == "killed by signal 45"
        assert str(Ending(1, None, "the store is too new")) == "the store is too new"


class TestPort:
    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
    def test_one_holds_it_and_takes_no_connections(self, host: str) -> None:
        held = HeldPort(f"{host}:0")
        try:
            with pytest.raises(OSError, match="the port is in use"):
                HeldPort(f"{host}:{held.port}")
            with socket.socket() as alone:
                alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with pytest.raises(OSError, match="in use"):
                    alone.bind(("127.0.0.1", held.port))
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", held.port))
        finally:
            held.close()
        HeldPort(f"{host}:{held.port}").close()

    def test_workers_share_it(self) -> None:
        held = HeldPort("127.0.0.1:0")
        with socket.socket() as one, socket.socket() as two:
            for worker in (one, two):
                worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                worker.bind(("127.0.0.1", held.port))
                worker.listen()
            with pytest.raises(OSError, match="the port is in use"):
                HeldPort(f"127.0.0.1:{held.port}")
        held.close()

    @pytest.mark.parametrize("listen", ["no.such.host.invalid:7800", "192.0.2.1:7800"])
    def test_what_is_not_this_hosts_is_refused(self, listen: str) -> None:
        with pytest.raises(OSError, match=r"listen: cannot listen on .*: the port is in use, or the address is not"):
            HeldPort(listen)


class TestSetting:
    def test_one_by_default(self) -> None:
        assert load({}, None)[0].workers == 1

    @pytest.mark.parametrize("value", ["0", "65", "-1", "many", "1.5", ""])
    def test_bad_numbers_are_refused_by_name(self, value: str) -> None:
        with pytest.raises(ConfigError, match=rf"workers \(flag --workers\): .*, not '{value}'"):
            load({"workers": value, "store": ON_POSTGRES}, None)

    @pytest.mark.parametrize("store", ["./tricord.db", "sqlite:///tricord.db"])
    def test_sqlite_takes_one(self, store: str) -> None:
        assert load({"workers": "1", "store": store}, None)[0].workers == 1
        with pytest.raises(ConfigError, match=r"workers \(2\) must be 1 on store .*: a SQLite file is locked for one"):
            load({"workers": "2", "store": store}, None)

    def test_file_and_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "tricord.toml"
        file.write_text(f'workers = 3\nstore = "{ON_POSTGRES}"\n')
        settings, origins = load({}, str(file))
        assert (settings.workers, origins["workers"]) == (3, f"file {file}")
        monkeypatch.setenv("TRICORD_WORKERS", "4")
        assert load({}, str(file))[0].workers == 4

    def test_the_command_says_so_and_makes_nothing(self, tmp_path: Path) -> None:
        for arguments, told in (
            (["--workers", "2"], "workers (2) must be 1 on store ./tricord.db"),
            (["--workers", "65", "--store", ON_POSTGRES], "workers (flag --workers): "),
        ):
            ended = tricord("serve", *arguments, cwd=tmp_path)
            assert ended.returncode == 2
            assert told in ended.stderr
        assert not list(tmp_path.iterdir())
