from __future__ import annotations

from pathlib import Path

from graftlm.ab.measure.prefix_caches import alive, forget
from tests.models import byte_tokenizer, tiny_model


def test_guidance_goes_on_with_the_last_text_until_it_has_to_forget_it(tmp_path: Path) -> None:
    from guidance import models

    tiny_model().save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    stock = models.Transformers(str(tmp_path), echo=False)

    def cached() -> int:
        before = stock.engine.get_logits(list(b"the same beginning"))
        return int(before["n_cached"])

    assert cached() == 0 and cached() > 0
    assert forget() >= 1
    assert cached() == 0


def test_objects_of_every_subclass_are_found_but_no_garbage() -> None:
    class Engine:
        other: Engine

    class Own(Engine):
        pass

    class Local(Own):
        pass

    assert alive(Engine) == []
    garbage, kept, other = Own(), Local(), Engine()
    garbage.other = garbage
    del garbage  # only its own cycle holds it
    assert {*alive(Engine)} == {kept, other}
    assert alive(Own) == alive(Local) == [kept]
