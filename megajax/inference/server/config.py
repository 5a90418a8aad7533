"""Settings of the server. Has no slow imports."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated

from megajax.fields.ranges import PositiveFloat, PositiveInt, Range
from megajax.inference.config import Pooling


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    model_name: str = "megajax"
    """Name of the model in requests and answers."""
    run: str = ""
    """Directory of the model."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: all of this machine."""
    port: Annotated[int, Range(at_least=0, at_most=2**16 - 1)] = 8000
    """Port to listen on; 0: any free one."""
    api_keys: tuple[str, ...] = ()
    """Requests must bring one of them; (): anyone may ask."""
    max_requests: PositiveInt = 4096
    """Most samples (prompts times n) that wait or run. A request that needs more than half of what is left of them, and
    more than 16, gets 429."""
    request_timeout_seconds: PositiveFloat = 600.0
    """A request that takes longer is cancelled; a stop waits at most this long, and a little for the errors."""
    max_body_bytes: PositiveInt = 32 * 2**20
    """Larger requests get 413."""
    max_images: PositiveInt = 32
    """Of a request."""
    image_hosts: tuple[str, ...] = ()
    """Hosts from which the server may fetch images of chats, with commas between them: exact names, without ports;
    (): nothing is fetched."""
    allow_load: bool = False
    """Whether /v1/load may replace the parameters."""
    log_requests: bool = True
    """Log a line per request: client, path, status, tokens, seconds."""
    pooling: Pooling = "mean"
    """Of a server that embeds: what becomes the vector of a text, the mean of its last hidden states or that of its
    first token."""
    sampling: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Values of Sampling in place of its defaults, for what a request does not say (`recommended_sampling`)."""
