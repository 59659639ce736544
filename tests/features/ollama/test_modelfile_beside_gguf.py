"""The Modelfile that scripts/export_gguf.py writes beside a GGUF file."""

import importlib.util

import pytest
from conftest import ROOT

from thinker.runtime.errors import UserError

pytest.importorskip("gguf")


@pytest.fixture
def export(monkeypatch, tiny_run):
    """Exports a run to a file, in this process."""
    spec = importlib.util.spec_from_file_location("export", ROOT / "scripts" / "export_gguf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(out):
        monkeypatch.setattr("sys.argv", ["export_gguf.py", str(tiny_run), str(out)])
        return module.main()

    return run


def test_it_names_the_file_and_the_context(export, tmp_path, capsys):
    assert export(tmp_path / "a.gguf") == 0
    beside = tmp_path / "a.Modelfile"
    assert f"wrote {beside}, for ollama create" in capsys.readouterr().out
    assert beside.read_text().startswith("FROM ./a.gguf\nPARAMETER num_ctx 32\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.Modelfile", "a.gguf"]


def test_it_replaces_no_file(export, tmp_path):
    (tmp_path / "a.Modelfile").write_text("mine")
    with pytest.raises(UserError, match=r"a\.Modelfile already exists"):
        export(tmp_path / "a.bin")
    with pytest.raises(UserError, match="has the name of the Modelfile"):
        export(tmp_path / "c.Modelfile")
    assert [path.name for path in tmp_path.iterdir()] == ["a.Modelfile"]
