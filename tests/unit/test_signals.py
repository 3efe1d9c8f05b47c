"""A participant's process hears SIGTERM whichever of its threads the system hands it to."""

import signal
import threading

from participant_sdk.serve import _signals


def test_a_signal_that_another_thread_is_handed_wakes_the_main_thread() -> None:
    waiting = threading.Event()
    handed = threading.Event()

    def another() -> None:
        waiting.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        handed.wait()  # a thread that ended could not be the one that sleeps on

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=another)
    thread.start()
    try:
        with _signals() as wait_for_signal:
            assert not wait_for_signal(0)
            waiting.set()
            assert wait_for_signal(60)
            assert signal.getsignal(signal.SIGTERM) is before, "a second signal ends the process at once"
    finally:
        waiting.set()
        handed.set()
        thread.join()
