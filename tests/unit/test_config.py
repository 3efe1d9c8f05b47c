"""Settings: precedence, limits, origins, masks."""

import json
from pathlib import Path

import pytest

from coordinator.config import ENV_PREFIX, ConfigError, Settings, load, masked_url, shown


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of this machine's."""
    for name in (*Settings.model_fields, "config"):
        monkeypatch.delenv(ENV_PREFIX + name.upper(), raising=False)


def written(folder: Path, text: str) -> str:
    """A config file."""
    path = folder / "tricord.toml"
    path.write_text(text)
    return str(path)


def test_defaults() -> None:
    settings, origins = load({}, None)
    assert (settings.store, settings.listen) == ("./tricord.db", "127.0.0.1:7800")
    policy = settings.policy()
    assert (policy.call_timeout_ms, policy.lease_ms) == (5_000, 10_000)
    assert (settings.timeout_ms, policy.backoff_base_ms, policy.backoff_cap_ms) == (30_000, 100, 15_000)
    assert policy.attention_after == 10
    assert set(origins) == set(Settings.model_fields)
    assert set(origins.values()) == {"default"}


def test_flag_over_environment_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "lease_ms = 11000\ncall_timeout_ms = 4000\nbackoff_cap_ms = 900\n")
    monkeypatch.setenv("TRICORD_LEASE_MS", "12000")
    monkeypatch.setenv("TRICORD_CALL_TIMEOUT_MS", "3000")
    settings, origins = load({"lease_ms": "13000", "store": None}, path)
    assert (settings.lease_ms, settings.call_timeout_ms, settings.backoff_cap_ms) == (13_000, 3_000, 900)
    assert settings.backoff_base_ms == 100
    assert origins["lease_ms"] == "flag --lease-ms"
    assert origins["call_timeout_ms"] == "environment TRICORD_CALL_TIMEOUT_MS"
    assert origins["backoff_cap_ms"] == f"file {path}"
    assert origins["backoff_base_ms"] == "default"


def test_the_file_may_be_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRICORD_CONFIG", written(tmp_path, "drain_ms = 1\n"))
    assert load({}, None)[0].drain_ms == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout_ms", 0), ("timeout_ms", 24 * 3_600_000 + 1), ("call_timeout_ms", 9), ("lease_ms", 99),
        ("backoff_base_ms", 0), ("backoff_cap_ms", 0), ("attention_after", 0), ("drain_ms", -1), ("lease_ms", "soon"),
        ("lease_ms", "1e9999"), ("log_level", "loud"), ("log_format", "xml"), ("store", ""), ("listen", " "),
        ("key_namespace", "x" * 65), ("key_namespace", "a\0b"), ("allow_registration", "perhaps"),
        ("alert_url", "hooks.example.org/x"), ("alert_url", "ftp://h/x"), ("alert_url", "http://"),
        ("alert_url", "http://h:99999/"), ("alert_url", "http://h/a b"), ("alert_url", "http://h/#x"),
        ("alert_url", "https://h/" + "x" * 2_000), ("alert_url", "http://h\n/x"), ("alert_url", "http:///x"),
        ("listen", "127.0.0.1:65536"), ("listen", "127.0.0.1:-1"), ("listen", "nonsense"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_origin(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as caught:
        load({name: value}, None)
    assert str(caught.value).startswith(f"{name} (flag --{name.replace('_', '-')}): ")
    if "\0" not in str(value):  # the environment cannot hold it
        monkeypatch.setenv(ENV_PREFIX + name.upper(), str(value))
        with pytest.raises(ConfigError, match=f"environment {ENV_PREFIX}{name.upper()}"):
            load({}, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lease = 5", "unknown setting lease; known are "),
        ("a = 1\nb = 2", "unknown setting a, b"),
        ("lease_ms = ", "not valid TOML"),
        ("lease_ms = [1]", "lease_ms (file "),
        ("store = 5", "store (file "),
        ("[server]\nlisten = 'x'", "unknown setting server"),
        ("participants = 5", "participants (file "),
        ("[participants.bank]\naddresses = ['h:0']\nactions = ['a']", "participants.bank.addresses.0 (file "),
        ("[participants.bank]\naddress = 'h:1'", "address (file "),
        ("[participants.bank]\n[participants.bank]", "Cannot declare ('participants', 'bank') twice"),
        ("[participants.'b k']\naddresses = ['h:1']\nactions = ['a']", "participants.b k (file "),
    ],
)
def test_a_wrong_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({}, written(tmp_path, text))
    assert said in str(caught.value)
    assert "tricord.toml" in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            load({}, str(path))
    (tmp_path / "latin.toml").write_bytes(b"store = '\xe9'")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load({}, str(tmp_path / "latin.toml"))


def test_an_unknown_key_of_a_participant_is_told_with_the_known_ones() -> None:
    given = '{"bank": {"addresses": ["h:1"], "actions": ["a"], "adress": "h:1"}}'
    with pytest.raises(ConfigError) as caught:
        load({"participants": given}, None)
    assert str(caught.value) == (
        "participants.bank.adress (flag --participants): is unknown; known are addresses, actions"
    )


def test_not_more_complaints_than_one_reads() -> None:
    given = json.dumps({f"p{n}": {"addresses": ["h:1"], "actions": [""]} for n in range(12)})
    with pytest.raises(ConfigError, match=r"participants.p9.actions.0 .*; and \d+ more$"):
        load({"participants": given}, None)


def test_a_lease_must_outlast_the_calls() -> None:
    with pytest.raises(ConfigError, match=r"lease_ms \(5500\) must be at least call_timeout_ms \(5000\) \+ 1000"):
        load({"lease_ms": 5_500}, None)
    assert load({"lease_ms": 6_000}, None)[0].lease_ms == 6_000
    with pytest.raises(ConfigError, match=r"backoff_base_ms \(16000\) must not be above backoff_cap_ms \(15000\)"):
        load({"backoff_base_ms": 16_000}, None)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("", ""),
        ("https://h:8443", "https://h:8443"),
        ("http://[::1]:80/", "http://[::1]:80/"),
        ("https://hooks.example.org/T1/s3cret", "https://hooks.example.org/***"),
        ("https://me:s3cret@h/x", "https://me:***@h/***"),
        ("https://h?token=s3cret", "https://h/***"),
    ],
)
def test_an_alert_url_shows_its_host_alone(url: str, masked: str) -> None:
    settings, _ = load({"alert_url": url}, None)
    assert settings.alert_url == url
    assert shown(settings)["alert_url"] == masked


def test_a_complaint_tells_no_secret() -> None:
    for url in ("hooks.example.org/T1/s3cret", "ftp://me:s3cret@h/s3cret"):
        with pytest.raises(ConfigError, match="must begin with http:// or https:// and a host") as caught:
            load({"alert_url": url}, None)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("./tricord.db", "./tricord.db"),
        ("postgresql://h/d", "postgresql://h/d"),
        ("postgresql://me@h/d", "postgresql://me@h/d"),
        ("postgresql://me:s3cret@h:5432/d?x=1", "postgresql://me:***@h:5432/d?x=1"),
        ("postgresql://me:s3%40cret@h/d", "postgresql://me:***@h/d"),
        ("postgresql://s3cret:s3cret@h/d", "postgresql://s3cret:***@h/d"),
        ("postgresql://me:@h/d", "postgresql://me:***@h/d"),
    ],
)
def test_passwords_are_masked(url: str, masked: str) -> None:
    assert masked_url(url) == masked
    assert shown(load({"store": url}, None)[0])["store"] == masked
