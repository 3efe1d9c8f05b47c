"""The coordinator's log: structured lines on standard error."""

from __future__ import annotations

import logging
import sys

import structlog


def configure(log_format: str, level: str, worker: int = 0) -> None:
    """Set up structlog, and send what libraries log through the standard library the same way.

    ``worker``: the number that each line carries, if any.
    """
    least = getattr(logging, level.upper())
    shared: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    of_worker = ""
    if worker:
        shared.append(lambda _logger, _name, event: {**event, "worker": worker})
        of_worker = f"worker {worker} "
    if log_format == "json":
        last: list[structlog.typing.Processor] = [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(),
        ]
    else:
        last = [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    structlog.configure(
        processors=[*shared, *last],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line is one write: workers share the stream
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format=f"%(asctime)s %(levelname)s {of_worker}%(name)s %(message)s"
    )
