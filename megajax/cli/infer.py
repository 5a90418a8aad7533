"""Use a trained model: infer.py COMMAND --run=DIR [options]

  generate  continues each --prompt="..." and prints it; a model with an encoder
            writes its answer
  chat      a conversation in the terminal; an empty line or ctrl-D ends it,
            ctrl-C ends an answer
  serve     an HTTP server with OpenAI's interface, and a page to chat with the
            model
  bench     measures prefill and decode speed, or latency and throughput under
            load, here or of a server
  fill      the most likely tokens for each [MASK] of --text="..." (BERT)
  embed     a vector for each text (BERT)
  classify  the class of each text, or of its words (BERT with a classification
            head)

--help after a command shows its options. --mesh.tensor=2 (or another axis of
the mesh) spreads the model over devices.
"""

from megajax.cli import encoding, generation, serving
from megajax.terminal.command_line import choose

COMMANDS = {
    "generate": generation.Generate,
    "chat": generation.Chat,
    "serve": serving.Serve,
    "bench": serving.Bench,
    "fill": encoding.Fill,
    "embed": encoding.Embed,
    "classify": encoding.Classify,
}


def main(arguments: list[str]) -> None:
    choose(COMMANDS, arguments, "infer.py", __doc__)()
