"""Chat templates with the habits of published models, cut down to what makes them different."""

ALTERNATE = """\
{%- for m in messages if m.role != 'system' %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- endfor %}"""
# The system message inside the first user turn, and a text that ends each answer.
LLAMA_2 = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% endif %}
{%- for m in messages if m.role != 'system' %}
{%- if m.role == 'user' %}[INST] {% if loop.first and system %}<<SYS>>{{ system }}<</SYS>> {% endif %}
{{- ' ' + m.content }} [/INST]{% else %} {{ m.content }} </s>{% endif %}
{%- endfor %}"""
# The system message moves to the last user turn.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}[INST] {% if loop.last and system %}{{ system }}: {% endif %}{{ m.content }}[/INST]
{%- else %} {{ m.content }}</s>{% endif %}
{%- endfor %}"""
TRIMS = """\
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
REWRITES = """\
{%- for m in messages %}{{ m.role }}{% if loop.last %}!{% endif %}: {{ m.content }}{% if loop.last %};{% endif %}
{%- endfor %}"""
# Tools and a default for the system message.
CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'You help.' }}{%- endif %}
{{- '\\n\\n<tools>' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == 'tool' %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != 'tool') %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
# The day, and the system message taken out of the list.
LLAMA_3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
{%- if strftime_now is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}
{%- set date_string = '26 Jul 2024' %}{%- endif %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] | trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{%- endif %}
{{- system_message }}{{- '<|eot_id|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# Another name for the assistant, no system message of its own.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set first = messages[0]['content'] + '\\n\\n' %}{% set loop_messages = messages[1:] %}
{%- else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
{%- if message['content'] is string %}{{ message['content'] | trim }}
{%- else %}{% for item in message['content'] %}{{ item['text'] | trim }}{% endfor %}{% endif %}
{{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# Thoughts are cut out of what the assistant said before the last question, which is looked for from the end.
THINKS = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' and not m.content.startswith('<tool>') %}{% set ns.last = loop.index0 %}
{%- endif %}{% endfor %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in m.content %}
{{- m.content.split('</think>')[-1] }}{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
