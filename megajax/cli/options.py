"""Options that several commands of infer.py share. Has no slow imports."""

import dataclasses
import logging
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from megajax.inference.config import Sampling, Seed, ServingConfig
from megajax.terminal.command_line import OnDevices, Part

if TYPE_CHECKING:
    from megajax.data.tokenizers.chat_template import ChatTemplate
    from megajax.inference.engine import Engine
    from megajax.inference.load import OpenedModel
    from megajax.inference.server.engine_process import EngineProcess

logger = logging.getLogger("megajax")

CHOSEN = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfModel(OnDevices):
    run: str
    """Directory of a run (runs/NAME) or a Hugging Face folder; hugging_face:ORG/NAME is one of the hub."""
    step: int | None = None
    """Step of the checkpoint; default: the newest."""

    def open(self) -> "OpenedModel":
        from megajax.inference.load import open_model
        from megajax.mesh.processes import use_compilation_cache

        opened = open_model(self.run, self.started_mesh(), self.step)
        use_compilation_cache()
        return opened


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfEngine(OfModel):
    serving: Annotated[ServingConfig, Part(has_prefix=False)] = ServingConfig()
    draft_run: str | None = None
    """Run or Hugging Face folder of a smaller model that guesses --draft_tokens tokens."""

    def engine(self) -> "Engine":
        from megajax.inference.engine import Engine
        from megajax.mesh.processes import use_compilation_cache

        self.serving.check()
        engine = Engine.from_run(self.run, self.started_mesh(), self.step, self.serving, self.draft_run)
        use_compilation_cache()
        return engine


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfSampling:
    sampling: Annotated[Sampling, Part(only=CHOSEN, has_prefix=False)] = Sampling()
    seed: Seed | None = None
    """The same seed gives the same text; default: a new one each time."""

    def seeded(self) -> Sampling:
        """Raises ValueError for the first invalid value."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        sampling = dataclasses.replace(self.sampling, seed=seed)
        sampling.check()
        return sampling

    def say_seed(self, sampling: Sampling) -> None:
        if self.seed is None and sampling.temperature > 0:
            logger.info("seed %d; --seed=%d repeats this", sampling.seed, sampling.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfChats:
    chat_template: str | None = None
    """File with a jinja2 chat template; default: that of the tokenizer."""

    def check_template(self) -> None:
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            raise ValueError(f"chat_template={self.chat_template} is not a file; name one with a chat template")

    def template(self, engine: "Engine | EngineProcess") -> "ChatTemplate | None":
        from megajax.data.tokenizers.chat_template import find_chat_template

        return find_chat_template(engine.prompts.tokenizer, self.chat_template, engine.prompts.media_tokens)


def check_is_new(output: str | None) -> None:
    """Raises ValueError for a file that exists."""
    if output is not None and Path(output).exists():
        raise ValueError(f"output={output} exists; give a new file")


def read_lines(path: str, option: str, what: str) -> list[str]:
    """The lines of a file that are not empty, a `what` each. Raises ValueError that names the option."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{option}={path} cannot be read ({error})") from None
    if not lines:
        raise ValueError(f"{option}={path} has no {what}; write one per line")
    return lines
