"""The log says once what computes an operation."""

import functools
import logging

logger = logging.getLogger("megajax")


@functools.cache
def log_choice(what: str, choice: str) -> None:
    """Logs the same choice once in a process."""
    logger.info("%s: %s", what, choice)
