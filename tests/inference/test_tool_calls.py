"""Calls of tools: found in the text of each form however it is cut, and demanded by a grammar of that form."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megajax.data.tokenizers.chat_template import CHATML, ChatTemplate
from megajax.data.tokenizers.libraries import HuggingFaceTokenizer
from megajax.data.tokenizers.tokenizer import BytesTokenizer
from megajax.inference.config import Sampling
from megajax.inference.server.tool_calls import CallParser, ToolFormat, find_tool_format
from megajax.inference.tokens.grammar import Grammars
from servers import TEMPLATE

# As the templates of Mistral 7B v0.3 and Llama 3.1 write them.
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]"
    "{% elif m.tool_calls is defined %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}"
    "{{ (call.function | tojson)[:-1] + ', \"id\": \"' + call.id + '\"}' }}{{ ']' if loop.last else ', ' }}{% endfor %}"
    "{{ eos_token }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if 'tool_calls' in m %}"
    "{% set call = m.tool_calls[0].function %}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}{{ "}" }}'
    "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
HERMES = ToolFormat("<tool_call>", "\n", "arguments", "\n</tool_call>")
FORMATS = {"hermes": HERMES, "mistral": ToolFormat("[TOOL_CALLS]", " [", "arguments", "]"),
           "llama": ToolFormat("", "", "parameters", "")}  # fmt: skip
ONE = '{"name": "f", "arguments": {"a": "}\\"{\\\\"}}'
FOUND = ("f", {"a": '}"{\\'})
# form, text -> content, calls
TEXTS = [
    ("hermes", f"Hi\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{ONE}</tool_call>\nand", "Hi\nand", [FOUND] * 2),
    ("hermes", "a <tool_cal> b <", "a <tool_cal> b <", []),
    ("hermes", "<tool_call>{'name'}</tool_call>", "<tool_call>{'name'}</tool_call>", []),
    ("hermes", '<tool_call>\n{"name": "f", "arg', '<tool_call>\n{"name": "f", "arg', []),
    ("mistral", f'[TOOL_CALLS] [{ONE}, {ONE[:-1]}, "id": "abc"}}]', "", [FOUND] * 2),
    ("mistral", f"x[1] [TOOL_CALLS][{ONE}] [TOOL", "x[1] TOOL", [FOUND]),
    ("llama", ONE.replace("arguments", "parameters"), "", [FOUND]),
    ("llama", f"<|python_tag|>{ONE}; {ONE}", "", [FOUND] * 2),
    ("llama", f"The call {ONE}", f"The call {ONE}", []),
    ("llama", '{"name": "f"} is no call', '{"name": "f"} is no call', []),
    ("llama", "[" * 9 + "{" * 9, "[" * 9 + "{" * 9, []),
]


def special_tokenizer(tmp_path, *names):
    """Bytes, with further tokens."""
    bpe = tokenizers.models.BPE(
        {character: n for n, character in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}, []
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["</s>", *names])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))


def test_the_template_shows_how_calls_are_written(tmp_path):
    tokenizer = BytesTokenizer()
    assert find_tool_format(TEMPLATE, tokenizer) == FORMATS["hermes"]
    assert find_tool_format(ChatTemplate(LLAMA, {}, ()), tokenizer) == FORMATS["llama"]
    assert find_tool_format(ChatTemplate(CHATML, {}, ()), tokenizer) is None
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    special = special_tokenizer(tmp_path, "<s>", "[TOOL_CALLS]")
    template = ChatTemplate(MISTRAL, names, special.special_tokens)
    assert find_tool_format(template, special) == FORMATS["mistral"]
    assert find_tool_format(template, BytesTokenizer(["[TOOL_CALLS]"])) is None  # which decodes it to nothing


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
@given(cuts=st.lists(st.integers(0, 120), max_size=8))
def test_calls_are_found_wherever_the_text_is_cut(form, text, content, calls, cuts):
    for places in (sorted(cuts), range(len(text))):
        *pieces, last = (text[begin:end] for begin, end in itertools.pairwise([0, *places, None]))
        parser = CallParser(FORMATS[form].marker)
        found = [*(parser.add(piece, False) for piece in pieces), parser.add(last, True)]
        assert "".join(part for part, _ in found) == content
        functions = [call["function"] for _, part in found for call in part]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls
        assert parser.num_calls == len(calls)


@pytest.mark.parametrize("form", FORMATS)
def test_the_grammar_of_a_form_allows_its_calls_alone(form, tmp_path):
    tokenizer = special_tokenizer(tmp_path, "[TOOL_CALLS]")
    functions = [{"name": 'say "ä"', "parameters": {"properties": {"to": {"enum": ["me"]}}, "required": ["to"],
                                                    "additionalProperties": False}}]  # fmt: skip
    made = FORMATS[form]
    sampling = Sampling(grammar=made.grammar(functions, tokenizer.token_id))
    text = f'{made.marker}{made.before}{{"name": "say \\"ä\\"", "{made.key}": {{"to": "me"}}}}{made.after}'
    matcher = Grammars(tokenizer, tokenizer.vocab_size).start(sampling)
    for token in tokenizer.encode_template(text):
        allowed = matcher.mask()
        assert allowed[token // 32] >> (token % 32) & 1, tokenizer.decode([token])
        matcher.add(token)
    assert matcher.is_finished
    content, ((call,)) = CallParser(made.marker).add(text, True)
    assert (content, call["function"]) == ("", {"name": 'say "ä"', "arguments": '{"to": "me"}'})
