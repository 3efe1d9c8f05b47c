"""How replies are gathered into messages on their way out."""

from participant_sdk.exchange import MESSAGE_BYTES_MAX, MESSAGE_REPLIES_MAX, Outbox
from tricord.v1 import participant_pb2, types_pb2


def reply(call_id: int, size: int = 0) -> participant_pb2.Reply:
    return participant_pb2.Reply(call_id=call_id, result=types_pb2.Payload(data=b"x" * size))


def test_a_stream_is_over_when_it_ended_and_every_reply_is_out() -> None:
    outbox = Outbox()
    assert outbox.cut() is None
    outbox.expect(2)
    outbox.put(reply(1))
    outbox.end()
    assert [each.call_id for each in outbox.cut() or []] == [1]
    assert outbox.cut() is None
    outbox.put(reply(2))
    assert [each.call_id for each in outbox.cut() or []] == [2]
    assert outbox.cut() == []


def test_messages_are_cut_by_number() -> None:
    outbox = Outbox()
    outbox.expect(MESSAGE_REPLIES_MAX + 1)
    for call_id in range(MESSAGE_REPLIES_MAX + 1):
        outbox.put(reply(call_id))
    assert len(outbox.cut() or []) == MESSAGE_REPLIES_MAX
    assert len(outbox.cut() or []) == 1


def test_messages_are_cut_by_bytes_but_never_empty() -> None:
    outbox = Outbox()
    outbox.expect(4)
    for call_id in range(3):
        outbox.put(reply(call_id, MESSAGE_BYTES_MAX // 2 - 100))
    outbox.put(reply(3, 2 * MESSAGE_BYTES_MAX))
    assert [[each.call_id for each in outbox.cut() or []] for _ in range(3)] == [[0, 1], [2], [3]]


def test_a_broken_stream_forgets_its_replies() -> None:
    outbox = Outbox()
    outbox.expect(2)
    outbox.put(reply(1))
    outbox.abandon()
    assert outbox.cut() == []
    outbox.put(reply(2))
    assert outbox.cut() == []
