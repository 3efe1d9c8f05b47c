"""One timer for many deadlines, on both event loops."""

import asyncio

import pytest
import uvloop

from coordinator.delivery_deadlines import Deadlines


@pytest.mark.parametrize("loop_of", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_deadlines_that_have_passed_come_with_those_to_come(loop_of: "type[asyncio.AbstractEventLoop]") -> None:
    """A loop that is late adds what is due already; on uvloop such a timer does not know its own time."""

    async def fired() -> list[str]:
        loop = asyncio.get_running_loop()
        late: list[str] = []
        done = asyncio.Event()

        def time_out(key: str) -> None:
            deadlines.remove(key)
            late.append(key)
            if len(late) == 4:
                done.set()

        deadlines = Deadlines(loop, time_out)
        now_s = loop.time()
        deadlines.add("passed", now_s - 1)
        deadlines.add("passed before", now_s - 2)
        deadlines.add("to come", now_s + 0.05)
        deadlines.add("sooner", now_s + 0.02)
        deadlines.add("never", now_s + 3_600)
        deadlines.remove("never")
        await asyncio.wait_for(done.wait(), 60)
        deadlines.close()
        return late

    with asyncio.Runner(loop_factory=loop_of) as runner:
        late = runner.run(fired())
    assert sorted(late[:2]) == ["passed", "passed before"]
    assert late[2:] == ["sooner", "to come"]
