"""The table of the forms in which families of models write calls of tools and their reasoning.

To add a form, add a row here, and its name in `config.server`. The forms are from the chat templates that
the families publish: they show former calls as the models were trained to write them.
"""

from __future__ import annotations

import msgspec

from penstock.tokenizer.tool_formats import MISTRAL, NAME_END, Frame, ReasoningFormat, Tags, ToolFormat

_XML = Frame(
    call_open="<function=",
    name_end=">\n",
    body="tags",
    tags=Tags(key_open="<parameter=", key_end=">", value_end="</parameter>\n", padding="\n"),
    call_end="</function>\n",
    section_end="</tool_call>",
)
_SEED = Frame(
    call_open="<function=",
    name_end=">\n",
    body="tags",
    tags=Tags(key_open="<parameter=", key_end=">", value_end="</parameter>\n"),
    call_end="</function>\n",
    section_end="</seed:tool_call>",
)
_GLM = Frame(
    name_end="\n",
    body="tags",
    tags=Tags(key_open="<arg_key>", key_end="</arg_key>\n<arg_value>", value_end="</arg_value>\n"),
    call_end="</tool_call>",
)
_INVOKE = Frame(
    call_open='<invoke name="',
    name_end='">\n',
    body="tags",
    tags=Tags(key_open='<parameter name="', key_end='">', value_end="</parameter>\n"),
    call_end="</invoke>\n",
    section_end="</minimax:tool_call>",
    is_section=True,
)
_DSML = Frame(
    call_open='<｜DSML｜invoke name="',
    name_end='">\n',
    body="tags",
    tags=Tags(
        key_open='<｜DSML｜parameter name="',
        key_end='">',
        value_end="</｜DSML｜parameter>\n",
        type_attribute=' string="{}"',
    ),
    call_end="</｜DSML｜invoke>\n",
    section_end="</｜DSML｜function_calls>",
    is_section=True,
)
_DSML_TOOLS = msgspec.structs.replace(_DSML, section_end="</｜DSML｜tool_calls>")
_ELEMENTS = Frame(
    call_open=']<]minimax[>[<invoke name="',
    name_end='">',
    body="tags",
    tags=Tags(key_open="]<]minimax[>[<", key_end=">", value_end="]<]minimax[>[</{key}>", is_nested=True),
    call_end="]<]minimax[>[</invoke>\n",
    section_end="]<]minimax[>[</tool_call>",
    is_section=True,
)
_HUNYUAN = Frame(
    call_open="<tool_call:opensource>",
    name_end="<tool_sep:opensource>\n",
    body="tags",
    tags=Tags(
        key_open="<arg_key:opensource>",
        key_end="</arg_key:opensource>\n<arg_value:opensource>",
        value_end="</arg_value:opensource>\n",
    ),
    call_end="</tool_call:opensource>\n",
    section_end="</tool_calls:opensource>",
    is_section=True,
)
_MINICPM = Frame(
    name_end='">',
    body="tags",
    tags=Tags(key_open='<param name="', key_end='">', value_end="</param>", quotes=("<![CDATA[", "]]>")),
    call_end="</function>",
)
_KIMI_K3 = Frame(
    call_open='<|open|>call tool="',
    name_end='"<|sep|>',
    number_attribute=' index="{}"',
    body="tags",
    tags=Tags(
        key_open='<|open|>argument key="',
        key_end='"<|sep|>',
        value_end="<|close|>argument<|sep|>",
        type_attribute=' type="{}"',
        tells_names=True,
    ),
    call_end="<|close|>call<|sep|>",
    section_end="<|close|>tools<|sep|>",
    is_section=True,
)
_SOLAR = Frame(
    call_open="<|tool_call:begin|>",
    id_end="<|tool_call:name|>",
    name_end="<|tool_call:args|>",
    call_end="<|tool_call:end|>",
    section_end="<|calls|>",
    is_section=True,
)
_APERTUS = Frame(
    call_open='{"',
    name_end='": ',
    call_end="}",
    separator=", ",
    section_end="]<|tools_suffix|>",
    is_section=True,
)
_ATEM = Frame(
    call_open='<atem:invoke name="',
    call_written=' to={name}<|message|><atem:function_calls>\n<atem:invoke name="',
    name_end='">\n',
    body="tags",
    tags=Tags(key_open='<atem:parameter name="', key_end='">', value_end="</atem:parameter>\n"),
    call_end="</atem:invoke>\n",
    section_end="</atem:function_calls>",
)
_TO_RECIPIENTS = Frame(name_end="\n", separator=">>>", is_section=True)
_PYTHONIC = Frame(
    name_end="(",
    body="python",
    call_end=")",
    separator=", ",
    section_open="[",
    section_end="]",
    is_section=True,
)
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_V3 = Frame(
    call_open="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    name_end="\n```json\n",
    call_end="\n```<｜tool▁call▁end｜>",
    separator="\n",
    section_end="<｜tool▁calls▁end｜>",
    is_section=True,
)
_DEEPSEEK_V31 = Frame(
    call_open="<｜tool▁call▁begin｜>",
    name_end="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    section_end="<｜tool▁calls▁end｜>",
    is_section=True,
)
_KIMI = Frame(
    call_open="<|tool_call_begin|>",
    prefix="functions.",
    has_index=True,
    name_end="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    section_end="<|tool_calls_section_end|>",
    is_section=True,
)
_HARMONY = Frame(
    prefix="functions.",
    name_end="<|message|>",
    name_end_written=" <|constrain|>json<|message|>",
    call_end="<|call|>",
)
_FUNCTION = Frame(name_end=">", call_end="</function>")
_GEMMA = Frame(call_open="call:", body="gemma", quote='<|"|>', call_end="<tool_call|>")
_FUNCTION_GEMMA = Frame(call_open="call:", body="gemma", quote="<escape>", call_end="<end_function_call>")
_LFM = Frame(
    call_open="",
    name_end="(",
    body="python",
    call_end=")",
    separator=", ",
    section_end="]<|tool_call_end|>",
    is_section=True,
)
_OLMO = Frame(
    name_end="(",
    body="python",
    call_end=")",
    separator="\n",
    section_end="\n</function_calls>",
    is_section=True,
)

# The order counts: a model gets the first row that reads the call which its template shows. If no row does,
# it gets the first row whose signs its template has. `json` is not of a family; only a setting chooses it.
TOOL_FORMATS = (
    ToolFormat(
        name="mistral_args",
        opening=MISTRAL,
        is_named=True,
        has_short_ids=True,
        signs=(MISTRAL, NAME_END),
    ),
    ToolFormat(name="mistral", opening=MISTRAL, is_list=True, has_short_ids=True, signs=(MISTRAL,)),
    ToolFormat(
        name="hermes",
        opening="<tool_call>",
        closing="</tool_call>",
        padding="\n",
        signs=("<tool_call>", "</tool_call>"),
        foreign=("<function=", "<arg_key>"),
    ),
    ToolFormat(
        name="seed_oss",
        opening="<seed:tool_call>\n",
        also=("<seed:tool_call>",),
        frame=_SEED,
        signs=("<seed:tool_call>",),
    ),
    ToolFormat(
        name="qwen3_coder",
        opening="<tool_call>\n",
        also=("<tool_call>", "<function="),
        frame=_XML,
        signs=("<tool_call>", "<function=", "<parameter="),
    ),
    ToolFormat(name="glm45", opening="<tool_call>", frame=_GLM, signs=("<tool_call>", "<arg_key>")),
    ToolFormat(
        name="minimax_m2",
        opening="<minimax:tool_call>\n",
        also=("<minimax:tool_call>",),
        frame=_INVOKE,
        signs=("<minimax:tool_call>", "<invoke"),
    ),
    ToolFormat(
        name="minimax_m3",
        opening="]<]minimax[>[<tool_call>\n",
        also=("]<]minimax[>[<tool_call>",),
        frame=_ELEMENTS,
        tokens=("]<]minimax[>[",),
        signs=("]<]minimax[>[",),
    ),
    ToolFormat(
        name="minicpm5",
        opening='<function name="',
        frame=_MINICPM,
        signs=('<function name="', "<param name="),
    ),
    ToolFormat(
        name="hunyuan",
        opening="<tool_calls:opensource>\n",
        also=("<tool_calls:opensource>",),
        frame=_HUNYUAN,
        signs=(":opensource", "<tool_calls{}>"),
    ),
    ToolFormat(
        name="kimi_k3",
        opening="<|open|>tools<|sep|>",
        frame=_KIMI_K3,
        signs=("<|open|>", "<|sep|>"),
    ),
    ToolFormat(
        name="solar", opening="<|tool_calls|>", frame=_SOLAR, signs=("<|tool_calls|>", "<|tool_call:args|>")
    ),
    ToolFormat(name="apertus", opening="<|tools_prefix|>[", frame=_APERTUS, signs=("<|tools_prefix|>",)),
    ToolFormat(
        name="deepseek_v4",
        opening="<｜DSML｜tool_calls>\n",
        also=("<｜DSML｜tool_calls>",),
        frame=_DSML_TOOLS,
        tokens=("｜DSML｜",),
        signs=("｜DSML｜", "tool_calls>", "invoke name="),
        foreign=("function_calls>",),
    ),
    ToolFormat(
        name="deepseek_v32",
        opening="<｜DSML｜function_calls>\n",
        also=("<｜DSML｜function_calls>",),
        frame=_DSML,
        tokens=("｜DSML｜",),
        signs=("｜DSML｜", "invoke name="),
    ),
    ToolFormat(
        name="deepseek_v3", opening=_DEEPSEEK, frame=_DEEPSEEK_V3, signs=("<｜tool▁call▁begin｜>", "```json")
    ),
    ToolFormat(
        name="deepseek_v31",
        opening=_DEEPSEEK,
        frame=_DEEPSEEK_V31,
        signs=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    ),
    ToolFormat(
        name="kimi_k2",
        opening="<|tool_calls_section_begin|>",
        frame=_KIMI,
        signs=("<|tool_calls_section_begin|>",),
    ),
    ToolFormat(
        name="harmony",
        opening="<|channel|>commentary to=",
        frame=_HARMONY,
        messages="harmony",
        is_single=True,
        tokens=(
            "<|channel|>",
            "<|message|>",
            "<|start|>",
            "<|end|>",
            "<|constrain|>",
            "<|call|>",
            "<|return|>",
        ),
        signs=("<|channel|>commentary", "<|message|>"),
    ),
    ToolFormat(name="gemma4", opening="<|tool_call>", frame=_GEMMA, signs=("<|tool_call>call:",)),
    ToolFormat(
        name="function_gemma",
        opening="<start_function_call>",
        frame=_FUNCTION_GEMMA,
        signs=("<start_function_call>",),
    ),
    ToolFormat(name="lfm2", opening="<|tool_call_start|>[", frame=_LFM, signs=("List of tools: ",)),
    ToolFormat(
        name="olmo3", opening="<function_calls>\n", frame=_OLMO, signs=("<function_calls>", "<functions>")
    ),
    ToolFormat(
        name="functionary_v3", opening="<function=", frame=_FUNCTION, signs=("<function=", "</function>")
    ),
    ToolFormat(
        name="muse",
        opening="<atem:function_calls>\n",
        also=("<atem:function_calls>",),
        frame=_ATEM,
        is_single=True,
        signs=("<atem:function_calls>",),
    ),
    ToolFormat(
        name="functionary_v32",
        opening=">>>",
        is_opened=True,
        frame=_TO_RECIPIENTS,
        signs=(">>>all", "'>>>' +"),
    ),
    ToolFormat(
        name="cohere",
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        is_list=True,
        name_key="tool_name",
        arguments="parameters",
        index_key="tool_call_id",
        signs=("<|START_ACTION|>",),
    ),
    ToolFormat(
        name="command_r",
        opening="Action:\n```json\n",
        closing="```",
        is_list=True,
        name_key="tool_name",
        arguments="parameters",
        signs=("Action:", "```json", '"tool_name"'),
    ),
    ToolFormat(
        name="phi4_mini",
        opening="<|tool_call|>",
        closing="<|/tool_call|>",
        is_list=True,
        signs=("<|tool|>", "<|/tool|>"),
    ),
    ToolFormat(name="granite", opening="<|tool_call|>", is_list=True, signs=("<|tool_call|>",)),
    ToolFormat(name="firefunction", opening="functools", is_list=True, signs=("functools[",)),
    ToolFormat(
        name="gigachat",
        opening="<|message_sep|>\n\nfunction call<|role_sep|>\n",
        also=("function call<|role_sep|>\n",),
        tokens=("<|role_sep|>", "<|message_sep|>"),
        signs=("function call", "role_sep"),
    ),
    ToolFormat(name="gigachat3", opening="<|function_call|>", signs=("<|function_call|>",)),
    ToolFormat(
        name="nemotron_json",
        opening="<TOOLCALL>",
        closing="</TOOLCALL>",
        is_list=True,
        signs=("<TOOLCALL>",),
    ),
    ToolFormat(
        name="minimax_m1",
        opening="<tool_calls>",
        closing="</tool_calls>",
        padding="\n",
        is_lines=True,
        signs=("<beginning_of_sentence>", "<tool_calls>"),
    ),
    ToolFormat(
        name="tool_calls",
        opening="<tool_calls>",
        closing="</tool_calls>",
        is_list=True,
        signs=("<tool_calls>",),
    ),
    ToolFormat(
        name="internlm",
        opening="<|action_start|><|plugin|>\n",
        closing="<|action_end|>",
        arguments="parameters",
        signs=("<|action_start|>",),
    ),
    ToolFormat(
        name="llama3_json",
        opening="<|python_tag|>",
        is_bare=True,
        arguments="parameters",
        is_single=True,
        signs=("<|start_header_id|>", '"parameters": '),
    ),
    ToolFormat(
        name="pythonic",
        opening="<|python_start|>",
        closing="<|python_end|>",
        is_bare=True,
        frame=_PYTHONIC,
    ),
    ToolFormat(name="json", is_bare=True),
)
REASONING_FORMATS = (
    ReasoningFormat(name="mistral", opening="[THINK]", closing="[/THINK]", signs=("[THINK]",)),
    ReasoningFormat(
        name="harmony",
        opening="<|channel|>analysis<|message|>",
        closing="<|end|>",
        messages="harmony",
        resumes="<|start|>assistant",
        answers="<|channel|>final<|message|>",
        remarks="<|channel|>commentary<|message|>",
        tokens=("<|start|>", "<|constrain|>", "<|call|>", "<|return|>"),
        signs=("<|channel|>analysis<|message|>",),
    ),
    ReasoningFormat(
        name="granite",
        opening="<think>",
        closing="</think>",
        around=("<response>", "</response>"),
        signs=("<think>", "</think>", "<response>"),
    ),
    ReasoningFormat(
        name="seed_oss", opening="<seed:think>", closing="</seed:think>", signs=("<seed:think>",)
    ),
    ReasoningFormat(
        name="muse",
        opening=" to=self<|message|>",
        closing="<|eom|>",
        messages="muse",
        resumes="<|start|>assistant",
        answers="<|message|>",
        tokens=("<|start|>", "<|message|>", "<|eot|>"),
        signs=("<atem:function_calls>", "to=self"),
    ),
    ReasoningFormat(
        name="solar",
        opening="<|think|>",
        closing="<|end|>",
        messages="solar",
        resumes="<|begin|>assistant",
        answers="<|content|>",
        tokens=("<|begin|>", "<|tool_calls|>", "<|calls|>"),
        signs=("<|begin|>assistant<|think|>", "<|begin|>assistant<|content|>"),
    ),
    ReasoningFormat(
        name="functionary", opening="", closing="", messages="functionary", answers="all\n", signs=(">>>all",)
    ),
    ReasoningFormat(name="minimax_m3", opening="<mm:think>", closing="</mm:think>", signs=("</mm:think>",)),
    ReasoningFormat(
        name="hunyuan",
        opening="<think:opensource>",
        closing="</think:opensource>",
        signs=(":opensource", "<think{}>"),
    ),
    ReasoningFormat(
        name="kimi_k3",
        opening="<|open|>think<|sep|>",
        closing="<|close|>think<|sep|>",
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
        ending="<|close|>message<|sep|>",
        signs=("<|open|>", "<|sep|>"),
    ),
    ReasoningFormat(
        name="gemma4", opening="<|channel>thought", closing="<channel|>", signs=("<|channel>thought",)
    ),
    ReasoningFormat(
        name="cohere",
        opening="<|START_THINKING|>",
        closing="<|END_THINKING|>",
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        signs=("<|START_THINKING|>",),
    ),
    ReasoningFormat(name="qwen3", opening="<think>", closing="</think>", signs=("</think>",)),
    ReasoningFormat(name="deepseek_r1", opening="<think>", closing="</think>", is_open=True),
)
