"""Exports on a processor that lacks what they were compiled for, or what makes their number format fast."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rayrec.inference import ExportError, ExportOptions, Model, artifact, processor
from rayrec.train import export_run

SKYLAKE = "cx16 lahf_lm popcnt pni ssse3 sse4_1 sse4_2 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave avx512f avx512_vnni"


@pytest.fixture
def cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that lists this processor's flags."""
    pretended = tmp_path / "cpuinfo"
    monkeypatch.setattr(processor, "CPUINFO", pretended)
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    pretended.write_text(f"processor\t: 0\nflags\t\t: fpu {SKYLAKE} hypervisor\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    return pretended


def compiled_copy(exported: Path, folder: Path, **index: object) -> Path:
    """Says that it holds a compiled graph, which no test here runs."""
    shutil.copytree(exported, folder)
    path = folder / artifact.INDEX
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"targets": ["eager", "aoti"]} | index))
    return folder


def test_a_graph_compiled_for_another_processor_is_not_run(
    exported: Path, cpu: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs = [*processor.instructions_of("x86-64-v3"), "amx_tile", "avx512_bf16"]
    copy = compiled_copy(exported, tmp_path / "model", march="native", instructions=needs)
    model = Model(copy)
    lacks = "compiled for native processors, this one lacks amx_tile, avx512_bf16"
    assert model.target == "eager" and lacks in model.warnings[0] and lacks in caplog.text
    with pytest.raises(ExportError, match=lacks):
        Model(copy, target="aoti")
    assert not Model(copy, target="eager").warnings
    old = Model(compiled_copy(exported, tmp_path / "old", march=None, instructions=[]))
    assert old.target == "eager" and "did not record the processor" in old.warnings[0]


def test_a_level_runs_wherever_its_flags_are(cpu: Path) -> None:
    assert processor.choose_march(None) == "x86-64-v3"
    assert not processor.missing(processor.instructions_of("x86-64-v3"))
    cpu.write_text("flags : fpu sse4_2 avx\n")
    assert {"avx2", "fma"} <= set(processor.missing(processor.instructions_of("x86-64-v3")))
    cpu.unlink()  # a system that lists none
    assert "avx2" in processor.missing(processor.instructions_of("x86-64-v3"))


def test_native_needs_the_instructions_of_this_processor_and_no_flags_of_its_kernel(cpu: Path) -> None:
    assert processor.instructions_of("native") == sorted(SKYLAKE.split())


def test_an_instruction_set_that_cannot_be_compiled_for_is_named(cpu: Path) -> None:
    with pytest.raises(ExportError, match="--march skylake: this machine and torch support x86-64-v3 and native"):
        processor.choose_march("skylake")
    with pytest.raises(ExportError, match=r"--march native: .* add --target aoti"):
        ExportOptions(march="native")


def test_a_format_without_instructions_is_refused_before_a_table_is_read(
    run: Path, exported: Path, cpu: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for data in (copy / "checkpoints").rglob("*.safetensors"):
        data.unlink()
    text = r"no instructions for bf16 \(it lacks avx512_bf16 or amx_bf16 or bf16\).* use --force"
    with pytest.raises(ExportError, match=text):
        export_run(copy, tmp_path / "model", ExportOptions(dense="bf16"))
    ExportOptions(dense="bf16", force=True).check_machine()
    ExportOptions(tables="int8").check_machine()
    cpu.write_text("flags : fpu sse4_2 avx avx512_bf16\n")
    ExportOptions(dense="bf16").check_machine()
    with pytest.raises(ExportError, match="no instructions for int8"):
        ExportOptions(tables="int8").check_machine()


def test_a_model_that_is_slow_here_says_so(exported: Path, cpu: Path, tmp_path: Path) -> None:
    copy = compiled_copy(exported, tmp_path / "model", dense="bf16", targets=["eager"])
    assert "no instructions for bf16" in Model(copy).warnings[0]
    cpu.write_text("flags : fpu avx2 amx_bf16\n")
    assert not Model(copy).warnings
