"""Chat templates; the oracle is transformers' `apply_chat_template`. The templates follow the styles in use."""

import dataclasses
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdel import text
from fdel.text import chat

transformers = pytest.importorskip("transformers", reason="the oracle")

TEMPLATES = {
    "llama3": """
{{- bos_token }}
{%- if not date_string is defined %}{% set date_string = strftime_now("%d %b %Y") %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{% if tools is not none %}
Environment: ipython
{% endif %}
Today Date: {{ date_string }}

{{ system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
            + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{ raise_exception("one tool call at a time") }}{% endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- else %}
        {{- message.content | tojson if message.content is mapping or message.content is iterable }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    "chatml": """{% for message in messages %}
{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}""",
    "qwen": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content or '' %}
        {%- if not reasoning and '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n')
                + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "gemma": """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}{%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
""",
    "mistral": """{%- set loop_messages = messages[1:] if messages[0]["role"] == "system" else messages %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.function.items() if key != "return" %}
                    {{- '"' + key + '": ' + (val | tojson) }}{% if not loop.last %}{{ ", " }}{% endif %}
                {%- endfor %}
                {{- "}}" }}{% if not loop.last %}{{ ", " }}{% else %}{{ "]" }}{% endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " ~ message["content"] ~ "[/INST]" }}
    {%- elif message["role"] == "assistant" and message.content is defined %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- elif message.role == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- elif message["role"] not in ["system", "assistant"] %}
        {{- raise_exception("Only user and assistant roles are supported, not " + message.role) }}
    {%- endif %}
{%- endfor %}""",
    "deepseek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}
{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{'<｜User｜>' + message['content']}}
{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not defined %}{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls']%}{%- if not ns.is_first %}
{{'<｜Assistant｜><｜tool▁call▁begin｜>' + tool['function']['name']
    + '\\n```json\\n' + tool['function']['arguments']|tojson(indent=2) + '\\n```'}}
{%- set ns.is_first = true -%}{%- else %}{{'\\n' + tool['function']['name']}}{%- endif %}{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and message['content'] is defined %}{% set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{{
'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}
{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}""",
    "macros": """{%- macro param(schema, depth=0) -%}
    {%- for name, spec in schema.properties | dictsort -%}
        {{ "  " * depth }}{{ name }}: {{ spec.type | default("any") }}{{ "?" if name not in schema.required }};
{% if spec.properties %}{{ param(spec, depth + 1) }}{% endif %}
    {%- endfor -%}
{%- endmacro -%}
{%- macro turn(role) %}<|{{ role }}|>{{ caller() }}<|end|>{% endmacro %}
{% set total = namespace(chars=0) -%}
{% for tool in tools or [] %}{{ tool.function.name }}({{ param(tool.function.parameters) }}){% endfor %}
{% for m in messages recursive %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {% set total.chars = total.chars + m.content | default('') | string | length %}
    {% call turn(m.role) %}{{ m.content | default('(none)') | upper | replace('\\n', ' ') }}{% endcall %}
    {% if loop.index > 4 %}{% break %}{% endif %}
{% else %}nothing{% endfor %}
{{ '%05d|%s' % (total.chars, total.chars ** 2 // 3) }} {{ [1, 2] + [3] }} {{ 2.5 * 2 }}
{{ dict(a=1, b='<x>') | tojson }}
{{ range(3) | list | tojson }} {{ {'b': 1, 'a': '<é&>'} | tojson(sort_keys=true, separators=(',', ':')) }}
{% filter indent(2) %}{{ 'a\\nb' }}
c{% endfilter %}
""",
    "phi": """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}
    {{'<|user|>' + '
' + message['content'] + '<|end|>' + '
' + '<|assistant|>' + '
'}}{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '
'}}{% endif %}{% endfor %}{{ documents | tojson if documents }}{{ unknown_variable }}{{ custom }}""",
    "gpt_oss": """
{%- for message in messages -%}
    {%- if message.thinking -%}{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|>' -}}{%- endif -%}
    {{- '<|start|>' + message.role + '<|message|>' + (message.content or '') | string + '<|end|>' -}}
{%- endfor -%}""",
    "generation": """{% for message in messages %}
    {%- if message.role == 'assistant' -%}
        <|im_start|>assistant
{% generation %}{{ message.reasoning_content | default('') }}{{
message.content | default('') }}<|im_end|>{% endgeneration %}

    {%- else %}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the <weather> & wind\u2028, à la carte",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Köln", "東京"]},
                "at": {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": []},
            },
            "required": ["city"],
        },
    },
}
CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Köln", "at": None}}}
CHATS = {
    "plain": [
        {"role": "system", "content": " Be <brief> & kind.\n"},
        {"role": "user", "content": "Hi 👋🏽 \n there\n"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello! "},
        {"role": "user", "content": "1 < 2 && 'x' \"y\""},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"t": 21}', "tool_call_id": "c1"},
        {"role": "tool", "content": "{}", "name": None},
        {"role": "assistant", "content": "It is 21°.", "reasoning": "They asked; so.\n"},
    ],
    "parts": [
        {"role": "user", "content": [{"type": "image", "image": np.zeros(2)}, {"type": "text", "text": " What? "}]},
        {"role": "assistant", "content": "A cat", "thinking": "cats"},
    ],
    "odd": [{"role": "narrator", "content": "Once", "n": np.float32(0.5), "f": np.bool_(False), "t": (1, "a")}],
}
# What a request may ask for; each must be rendered as transformers renders it, or be refused as it refuses it.
REQUESTS = {
    "bare": {},
    "prompt": {"add_generation_prompt": True},
    "tools": {"tools": [TOOL, TOOL], "add_generation_prompt": True, "enable_thinking": False},
    "documents": {"documents": [{"title": "T", "text": "<b>"}], "custom": {"a": [np.int64(3)]}, "bos_token": "[B]"},
    "open": {"continue_final_message": True},
    "open_reasoning": {"continue_final_message": "reasoning_content"},
    "open_thinking": {"continue_final_message": "thinking"},
    "both": {"continue_final_message": True, "add_generation_prompt": True},
}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory):
    """Our tokenizer and transformers', loaded from one folder."""
    folder: Path = tmp_path_factory.mktemp("chat")
    special = ["<|im_start|>", "<|im_end|>", "<s>", "<pad>"]
    ours = text.train_bpe([*TEMPLATES.values(), "user assistant What is 2+2? It is 4."], 420, special)
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<pad>"}
    text.save(dataclasses.replace(ours, special=names, templates={"default": TEMPLATES["generation"]}), folder)
    return text.load(folder), transformers.AutoTokenizer.from_pretrained(folder)


def theirs_or_error(theirs, messages: list, **request: object) -> str | None:
    try:
        return theirs.apply_chat_template(messages, tokenize=False, **request)
    except Exception:  # any error of theirs must be an error of ours
        return None


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("chat_name", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_as_transformers(pair, name: str, chat_name: str, request_name: str) -> None:
    ours, theirs = pair
    messages, request = CHATS[chat_name], REQUESTS[request_name]
    before = repr(messages)
    expected = theirs_or_error(theirs, messages, chat_template=TEMPLATES[name], **request)
    if expected is None:
        with pytest.raises(text.ChatError):
            text.render_chat(ours, messages, template=TEMPLATES[name], **request)
    else:
        assert text.render_chat(ours, messages, template=TEMPLATES[name], **request) == expected
    assert repr(messages) == before


def test_the_oracle_renders_enough(pair) -> None:
    """The comparison above is not mostly one of errors: each template and each request renders for some chat."""
    _, theirs = pair
    done = {
        (name, r)
        for name, template in TEMPLATES.items()
        for r in REQUESTS
        if any(theirs_or_error(theirs, c, chat_template=template, **REQUESTS[r]) for c in CHATS.values())
    }
    assert {name for name, _ in done} == set(TEMPLATES) and len(done) >= 5 * len(TEMPLATES)
    assert {r for _, r in done} == set(REQUESTS) - {"both"}


words = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["", "<|im_end|>", "{{ x }}", "{% if %}"])


@pytest.mark.parametrize("name", ["chatml", "gemma", "generation"])
@settings(max_examples=30)
@given(contents=st.lists(words, min_size=1, max_size=4), flag=st.sampled_from([*REQUESTS][:6]))
def test_any_content(pair, name: str, contents: list[str], flag: str) -> None:
    ours, theirs = pair
    messages = [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]
    expected = theirs_or_error(theirs, messages, chat_template=TEMPLATES[name], **REQUESTS[flag])
    if expected is not None:
        assert text.render_chat(ours, messages, template=TEMPLATES[name], **REQUESTS[flag]) == expected


def test_named_templates(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair
    templates = {"default": "d{{ tools }}", "tool_use": "t{{ tools }}", "rag": "r"}
    named = dataclasses.replace(ours, templates=templates)
    monkeypatch.setattr(theirs, "chat_template", templates)
    for request in ({}, {"tools": [TOOL]}, {"tools": []}):
        for template in (None, "rag", "default", "text {{ bos_token }}"):
            expected = theirs.apply_chat_template(CHATS["plain"], tokenize=False, chat_template=template, **request)
            assert text.render_chat(named, CHATS["plain"], template=template, **request) == expected
    with pytest.raises(text.ChatError, match=r"no default chat template, found \['rag'\]"):
        text.render_chat(dataclasses.replace(ours, templates={"rag": "r"}), CHATS["plain"])


def weather(city: str) -> str:
    """Tell the weather."""
    return city


@pytest.mark.parametrize(
    ("template", "request_", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", {}, "TemplateError: roles must alternate"),
        ("{% if %}", {}, "TemplateSyntaxError"),
        ("{{ messages[0].a.b }}", {}, "UndefinedError"),
        ("{{ 1 / 0 }}", {}, "ZeroDivisionError"),
        ("{{ missing | tojson }}", {}, "TypeError"),
        ("{{ messages.append(1) }}", {}, "SecurityError"),
        ("", {"tools": [weather]}, "tools must be JSON schemas"),
        ("", {"documents": ["x"]}, "documents must be dicts"),
        ("{{ messages[0].content | trim }}", {"continue_final_message": "tool_calls"}, "'tool_calls' is not both"),
        ("{{ messages[0].role }} content", {"continue_final_message": True}, "drops or changes"),
    ],
)
def test_errors(pair, template: str, request_: dict, match: str) -> None:
    with pytest.raises(text.ChatError, match=match):
        text.render_chat(pair[0], CHATS["plain"][:2], template=template, **request_)


@pytest.mark.parametrize(
    "change", ["{% set n = namespace(__call__=1) %}", "{% set n = namespace() %}{% set n._x = 1 %}"]
)
def test_namespace_names(pair, change: str) -> None:
    ours, theirs = pair
    assert theirs_or_error(theirs, TURNS, chat_template=change) is None
    with pytest.raises(text.ChatError, match="begins with an underscore"):
        text.render_chat(ours, TURNS, template=change)


@pytest.mark.parametrize(("messages", "match"), [([], "the chat is empty"), (["hi"], "expected messages to be dicts")])
def test_no_messages(pair, messages: list, match: str) -> None:
    with pytest.raises(text.ChatError, match=match):
        text.render_chat(pair[0], messages)


# ---- the assistant's tokens ----------------------------------------------------------------------------------------

TURNS = [
    {"role": "user", "content": "What is 2+2?"},
    {"role": "assistant", "content": "It is 4. 👍🏽 ok"},
    {"role": "user", "content": "And 3+3? <|im_end|>é"},
    {"role": "assistant", "content": "", "reasoning_content": "Six: 6"},
]


@pytest.mark.parametrize(
    "messages", [TURNS, TURNS[:1], TURNS[1:3], CHATS["plain"], CHATS["tools"]], ids=lambda m: str(len(m))
)
@pytest.mark.parametrize("prompt", [False, True])
def test_mask(pair, messages: list, prompt: bool) -> None:
    ours, theirs = pair
    messages = [m for m in messages if m.get("content") is not None]
    options = {"return_assistant_tokens_mask": True, "return_dict": True}
    expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, **options)
    ids, mask = text.chat_tokens(ours, messages, add_generation_prompt=prompt)
    assert (ids, mask) == (expected["input_ids"], expected["assistant_masks"])
    assert any(mask) == any(m["role"] == "assistant" for m in messages)
    assert ids == text.encode(ours, text.render_chat(ours, messages, add_generation_prompt=prompt), special=False)


def test_mask_covers_all_tokens_of_the_last_character(pair) -> None:
    """transformers leaves out all but the first token of the character that ends a block."""
    ours, _ = pair
    template = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    ids, mask = text.chat_tokens(
        ours, [{"role": "a", "content": "x🦄"}, {"role": "b", "content": ""}], template=template
    )
    assert [text.decode(ours, [i]) for i, m in zip(ids, mask, strict=True) if not m] == ["a", ":", ";", "b", ":", ";"]
    assert text.decode(ours, [i for i, m in zip(ids, mask, strict=True) if m]) == "x🦄"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro f() %}ab{% generation %}x{% endgeneration %}{% endmacro %}{{ f() }}",
        "{% set s %}ab{% generation %}x{% endgeneration %}{% endset %}{{ s }}",
        "{% filter upper %}ab{% generation %}x{% endgeneration %}{% endfilter %}",
    ],
)
def test_mask_refuses_unknown_places(pair, template: str) -> None:
    assert "abx" in text.render_chat(pair[0], TURNS, template=template).lower()
    with pytest.raises(text.ChatError, match="its place in the text is unknown"):
        text.chat_tokens(pair[0], TURNS, template=template)


def test_mask_refuses_a_template_that_marks_nothing(pair) -> None:
    with pytest.raises(text.ChatError, match="no {% generation %} block, so nothing would be trained"):
        text.chat_tokens(pair[0], TURNS, template=TEMPLATES["chatml"])


# ---- hostile templates ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages['__class__'] }}",
        "{{ (messages | attr('__class__')).mro() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace(__call__=dict) %}{{ n() }}",
        "{% set n = namespace() %}{% set n.__call__ = dict %}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.update(messages[0], role='x') }}",
        "{{ messages.clear() }}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ image.save('x') }}",
    ],
)
def test_no_way_out(pair, template: str) -> None:
    """Each template fails, or writes nothing: Jinja leaves an undefined value in place of what is out of bounds."""

    class Image:
        def save(self, name: str) -> str:
            return "saved"

    try:
        assert text.render_chat(pair[0], TURNS, template=template, image=Image()) == ""
    except text.ChatError as e:
        assert "Error: " in str(e)


OUTER = "{% for i in range(100000) %}BODY{% endfor %}"
LOOP = OUTER.replace("BODY", OUTER)
GROW = "{% set n = namespace(x=START) %}" + OUTER.replace("BODY", "{% set n.x = n.x * n.x %}")
TWICE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
AGAIN = "{% for n in [60] recursive %}{% if n %}{{ loop([n - 1, n - 1]) }}{% endif %}{% endfor %}"
BOMBS = {
    "loops": (
        "{% set r = range(100000) %}" + LOOP.replace("range(100000)", "r").replace("BODY", ""),
        "runs for more than 0.3 seconds",
    ),
    "macros": (TWICE, "runs for more than 0.3 seconds"),
    "recursive loop": (AGAIN, "runs for more than 0.3 seconds"),
    "recursion": ("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "output": (LOOP.replace("BODY", "{{ i }}" + "x" * 99), "more than 100000 characters"),
    "range": ("{{ range(100001) | list }}", "OverflowError"),
    "string": ("{{ 'a' * 10000000000 }}", "more than 100000"),
    "list": ("{{ 10000000000 * [0] }}", "more than 100000"),
    "doubling": (GROW.replace("START", "'a'").replace("*", "+"), "more than 100000"),
    "product": (GROW.replace("START", "3"), "more than 100000"),
    "power": ("{{ 10 ** (10 ** 10) }}", "more than 100000"),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError"),
    "blocks": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "SyntaxError: too many statically nested blocks"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_limits(pair, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(chat, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(chat, "MAX_CHARS", 100_000)
    template, match = BOMBS[name]
    with pytest.raises(text.ChatError, match=match):
        text.render_chat(pair[0], TURNS, template=template)


def test_threads_share_nothing(pair) -> None:
    """Renderings of one template at the same time: each finds its own blocks."""
    ours, wrong = pair[0], []

    def work(n: int) -> None:
        turn = [{"role": "user", "content": "q" * n}, {"role": "assistant", "content": "a" * n}]
        expected = text.chat_tokens(ours, turn)
        wrong.extend(n for _ in range(20) if text.chat_tokens(ours, turn) != expected or not any(expected[1]))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("call", [
    "'a'.ljust(1500000000)", "'a'.rjust(10**9)", "'a'.center(2**40)", "'1'.zfill(10**9)", "('\t' * 9).expandtabs(10**8)",
    "('a' * 99999).replace('a', 'b' * 99999)", "('a' * 99999).join(['b'] * 99999)",
])  # fmt: skip
def test_methods_of_strings_build_nothing_large(call: str) -> None:
    """Refused before it is built."""
    tok = dataclasses.replace(text.train_bpe(["a"], 260), templates={"default": "{{ " + call + " }}"})
    with pytest.raises(text.ChatError, match="builds something of more than"):
        text.render_chat(tok, [{"role": "user", "content": "x"}])
    fine = dataclasses.replace(
        tok, templates={"default": "{{ 'ab'.ljust(4) ~ 'a-b'.replace('-', '+') ~ ','.join(['x', 'y']) }}"}
    )
    assert text.render_chat(fine, [{"role": "user", "content": "x"}]) == "ab  a+bx,y"
