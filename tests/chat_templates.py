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
