"""Whose code a call runs in."""

from __future__ import annotations

import json

import jinja2

from bench.frameworks import profile
from bench.frameworks.profile import owner_of, profiled


def test_time_counts_for_the_package_whose_code_runs_or_calls_the_interpreter() -> None:
    template = jinja2.Template("{% for i in range(3000) %}{{ i }}{% endfor %}")
    spent = profiled(lambda: (template.render(), json.dumps(list(range(10)), indent=1)))
    assert set(spent) >= {"jinja2", profile.LIBRARY}
    assert spent["jinja2"] > spent[profile.LIBRARY] > 0


def test_files_of_this_project_belong_to_their_folder() -> None:
    assert owner_of(str(profile.ROOT / "core" / "text" / "tokenizer.py")) == "core/text"
    assert owner_of(str(profile.ROOT / "graftlm" / "core" / "text" / "tokenizer.py")) == "core/text"
    assert owner_of(jinja2.__file__) == "jinja2"
    assert owner_of(json.__file__) == profile.LIBRARY
