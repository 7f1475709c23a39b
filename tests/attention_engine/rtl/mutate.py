"""Faults injected into the RTL, one at a time: the partner test of each module must fail. `./dev rtl --mutate`.

A fault is a text that occurs once in a module, and its replacement. The unmodified module has to pass first, in a
quarter of the time that a faulty one gets, so a fault that hangs counts as caught. Verdicts on the same RTL and tests
are remembered, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from rtl_bench import BUILDS, HERE, ROOT, SOURCES

from vcsd_eval.rtl.synth import sources

MEMORY = BUILDS / "mutants.json"
TIMEOUT_S = 400

FAULTS: dict[str, list[tuple[str, str]]] = {
    "fp16_product": [
        ("a_sign ^ b[15]", "a_sign"),
        ("{1'b0, a_shift} + {1'b0, fp16_shift(b)}", "{1'b0, a_shift} + {1'b0, b[14:10]}"),
        ("<< {coarse, 3'b0}", "<< {1'b0, coarse[1:0], 3'b0}"),
        ("size ^ {ACC_W{minus}}", "size"),
    ],
    "fp16_dot": [
        ("owes[i] <= owes[2*i+1];", "owes[i] <= owes[2*i];"),
        ("first[DEPTH-1] ? {ACC_W{1'b0}} : acc[now], 1'b1", "acc[now], 1'b1"),
        ("a_bad[3] || b_bad", "b_bad"),
        ("m_tvalid <= valid[DEPTH-1] && last[DEPTH-1]", "m_tvalid <= valid[DEPTH-1]"),
        ("assign en = m_tready || !m_tvalid", "assign en = 1'b1"),
    ],
    "gemv_qk": [
        ("if (s_k_tlast) word <= '0", "if (1'b0) word <= '0"),
        ("started <= !s_k_tlast", "started <= 1'b1"),
        ("ready && head == Q_HEADS - 1", "ready"),
    ],
    "gemv_av": [
        ("valid[2] && first[2]", "1'b0"),
        ("cool == '0 && !want", "!want"),
        ("cool <= short", "cool <= short >> 1"),
        ("|(lane_bad & keeps[4*LANES +: LANES])", "|lane_bad"),
        ("assign load = arrived &&", "assign load = pending &&"),
        ("want && !busy_bank && valid", "want && valid"),
        ("held[head] <= weight", "held[0] <= weight"),
        ("{bank, beats} <= s_drain_tdata", "{bank, beats} <= {1'b0, s_drain_tdata[POS_W-1:0]}"),
    ],
    "normalize": [("first ? in << (1 << HIGH) : in", "in"), ("second ? once << (1 << LOW)", "second ? once")],
    "skid": [("full ? spare : s_tdata", "s_tdata"), ("(full || s_tvalid);\n    if (rst)", "s_tvalid;\n    if (rst)")],
    "serial_divide": [
        ("!less[DEN_W]}", "less[DEN_W]}"),
        ("left <= NUM_W[COUNT_W-1:0]", "left <= NUM_W[COUNT_W-1:0] - 1'b1"),
    ],
    "serial_root": [
        ("rest <= next >= {root, 2'b01} ? less", "rest <= next > {root, 2'b01} ? less"),
        ("root <= '0", "root <= root"),
    ],
    "fx_scale": [
        ("(moved >> 1) + moved[0]", "(moved >> 1)"),
        ("over <= shift_1 < 0 && raw != '0", "over <= 1'b0"),
        ("sign[LATENCY-2] ? -size", "sign[LATENCY-3] ? -size"),
        ("shift_1 > 63 ? 6'd63", "1'b0 ? 6'd63"),
    ],
    "fx_product": [
        ("near[0] && (rest || near[1])", "near[0]"),
        ("size <= beyond || rounded[SIZE_W] ?", "size <= rounded[SIZE_W] ?"),
        ("a_sign ^ b[15]", "a_sign"),
        ("<< {coarse, 3'b0}", "<< {1'b0, coarse[1:0], 3'b0}"),
    ],
    "int8_unpack": [
        ("codes[8*i+7] ? -codes", "1'b0 ? -codes"),
        ("place >= -9'sd14", "place > -9'sd14"),
        ("exp + 8'sd24", "exp + 8'sd25"),
        ("exp_in > 8'sd9", "exp_in > 8'sd10"),
        ("exps <= of_v ?", "exps <= 1'b0 ?"),
        ("v_exps[8*row[LANE_W-1:0] +: 8]", "v_exps[7:0]"),
        ("row + ROW_W'(LANES)", "row"),
        ("if (k_last) row <= '0;", "if (1'b0) row <= '0;"),
        ("if (s_tlast && high)", "if (1'b0)"),
        ("word_last && (k_last || v_last)", "word_last && v_last"),
        ("line < LINE_W'(HEADER + 2 * ROWS);", "1'b1;"),
        ("assign en = m_tready || !m_tvalid", "assign en = 1'b1"),
    ],
    "digit_dots": [
        ("digits[8*(4*t+k%4)+2*(k/4) +: 2]", "digits[8*(4*t+k%4)+2*(k%4) +: 2]"),
        ("(digit[1] ? {once[TERM_W-2:0], 1'b0} : '0)", "(digit[1] ? once : '0)"),
        ("FOUR_W'($signed(terms[TERM_W*(4*k+3) +: TERM_W]))", "FOUR_W'(terms[TERM_W*(4*k+3) +: TERM_W])"),
        ("SUM_W'($signed(fours[3*FOUR_W +: FOUR_W]))", "SUM_W'($signed(fours[2*FOUR_W +: FOUR_W]))"),
    ],
    "digit_scores": [
        ("&& (q_channel != '0 || q_head != '0)", ""),
        ("loaded && !head_full", "loaded"),
        ("(FIFO_W+1)'(FIFO)", "(FIFO_W+1)'(FIFO + FIFO)"),
        ("7'({place_width - 3'd1, 1'b0})", "7'd0"),
        ("&& place_width != '0 &&", "&&"),
        ("term_sign ? -{8'b0, term_size}", "1'b0 ? -{8'b0, term_size}"),
        ("making_bad <= q_bad;", "making_bad <= 1'b0;"),
        ("width_1 != '0 && fp16_bad(scale_1)", "fp16_bad(scale_1)"),
        ("(moved[21:0] != '0 || moved[23])", "1'b1"),
        ("rounded[7] ? 7'd127 : rounded[6:0]", "rounded[6:0]"),
        ("blanks <= 32'(digits) >= DIGITS ?", "blanks <= 1'b1 ?"),
        ("slots != 2'd2", "1'b1"),
        ("half_out <= half_in", "half_out <= 1'b0"),
        ("(N_W-3)'(4'(i) < number_4[3:0])", "(N_W-3)'(0)"),
        ("!(begins_last && halves == 2'd2)", "1'b1"),
        ("block_half <= !block_half", "block_half <= 1'b0"),
        ("assign clear = out_token", "assign clear = 1'b1 || out_token"),
        ("top_1 > 7'(MAX_TOP) ?", "1'b0 ?"),
        ("{offset_4[OFFSET_W-1], offset_4, 35'b0}", "{1'b0, offset_4, 35'b0}"),
        ("(bad_before && !out_part_first)", "1'b0"),
        ("(over_before[out_head] && !out_part_first)", "over_before[out_head]"),
        ("sum_5 + (first_5 ? '0 : kept_5)", "sum_5"),
    ],
    "value_sums": [
        ("first_in <= s_w_tlast", "first_in <= 1'b0"),
        ("assign s_w_tready = !held[half_in]", "assign s_w_tready = 1'b1"),
        ("& ~{block_ends && half_work, block_ends && !half_work};\n    usable", "& ~2'b00;\n    usable"),
        (
            "{load_lasts[1] && half_2, load_lasts[1] && !half_2}",
            "{load && load_last && half_in, load && load_last && !half_in}",
        ),
        ("block_first <= 1'b1;", "block_first <= 1'b0;"),
        ("assign block_last = lines_left <= LEFT_W'(BEATS)", "assign block_last = lines_left < LEFT_W'(BEATS)"),
        ("<< V_BITS) -", "<< V_BITS) +"),
        ("power_6[2:0];", "power_5[2:0];"),
        ("<< {coarse_7, 3'b0}", "<< {1'b0, coarse_7[1:0], 3'b0}"),
        ("words[3*AT_W] ? '0 :", "1'b0 ? '0 :"),
        ("usable[half_work] && !draining", "usable[half_work]"),
        ("assign read_en = !idle || drain_read", "assign read_en = 1'b1"),
        ("lane == 2'd3))) && idle;", "lane == 2'd3)));"),
    ],
    "hadamard": [
        ("{user_in, one - in}", "{user_one, one - in}"),
        ("{user_in, one - in}", "{user_in, in - one}"),
        ("!owes || in_at <= out_at", "1'b1"),
        ("readys[s+1] || !out_valid", "1'b1"),
        ("{out_user, out} <= {user_one, one + in}", "{out_user, out} <= {user_in, one + in}"),
    ],
    "serial_multiply": [
        ("left <= B_W[COUNT_W-1:0]", "left <= B_W[COUNT_W-1:0] - 1'b1"),
        ("high <= '0;", "high <= high;"),
    ],
    "page_gains": [
        ("product[3*L_W-1:32+GAIN_W] != '0 ?", "1'b0 ?"),
        ("product[3*L_W-1:32+MASS_W] != '0 ?", "1'b0 ?"),
        ("ends[0] || s_w_tlast ? '0", "ends[0] ? '0"),
        ("gain_3 > gain_limit_3", "gain_3 >= gain_limit_3"),
        ("mass_3 > mass_limit_3", "mass_3 >= mass_limit_3"),
        ("begins_2[0] ? '0", "begins_2[1] ? '0"),
        ("hit_4 | (head_4 == '0 ? 2'b00 : any)", "hit_4"),
        ("hit_4 | (head_4 == '0 ? 2'b00 : any)", "hit_4 | any"),
        ("ends | {2{s_w_tlast}}", "ends"),
        ("gain_limits[limit_head] <=", "gain_limits[0] <="),
        ("assign en = m_tready || !m_tvalid", "assign en = 1'b1"),
    ],
    "value_weights": [
        ("token == '0 && head == '0", "token == '0"),
        ("size_1[15] && size_1[14:0] != '0", "size_1[15]"),
        ("fp16_bad(size_1) || negative_1", "fp16_bad(size_1)"),
        ("inside_1 <= {block, lane} <= token_last", "inside_1 <= 1'b1"),
        ("half_3 == 8'hFF ? 7'd127 :", "1'b0 ? 7'd127 :"),
        ("down_2 < 7'd8 ?", "down_2 < 7'd7 ?"),
        ("tops[i] <= 7'(MIN_TOP);", "tops[i] <= 7'(MIN_TOP + 1);"),
        ("7'((half_3 + 8'd1) >> 1)", "7'(half_3 >> 1)"),
        ("assign s_w_tready = sizes_in && !weighed", "assign s_w_tready = sizes_in"),
        ("assign en = m_tready || !m_tvalid", "assign en = 1'b1"),
    ],
    "progressive_engine": [
        ("put_at - page_at != 2'd2", "1'b1"),
        ("gain_ends[0] && !gain[0]) rest", "gain_ends[0]) rest"),
        ("|| e_user[0];", ";"),
        ("33'd8388607", "33'd8388606"),
        ("assign row_inside = row_at < count", "assign row_inside = 1'b1"),
        ("if (row_v) first_row <= 1'b0", "first_row <= 1'b0"),
        ("pages_in < 16'(PARTS)", "pages_in == '0"),
        ("reads == '0 ? '0 : kept[out_at]", "kept[out_at]"),
        ("chosen == '0 ? OUT_A'(OUT_N) : '0", "OUT_A'(OUT_N)"),
        ("quotient[24] ? 24'h800000 :", "1'b0 ? 24'h800000 :"),
        ("turned[47] ? turned[47:24] :", "1'b0 ? turned[47:24] :"),
        ("late_last || late_at == 9'(REFINED - 1)", "late_at == 9'(REFINED - 1)"),
        ("phase == CHOOSE ? 14'd17 : 14'd24", "phase == CHOOSE ? 14'd16 : 14'd24"),
        ("refined_done == chosen && pages_in == pages_due", "refined_done == chosen"),
    ],
    "exp2_unit": [
        ("rise <= entry_1[15:0] * low_1", "rise <= entry_1[15:0] * low"),
        ("{7'b0, rise[27:12]}", "{7'b0, rise[26:11]}"),
    ],
    "softmax_online": [
        ("above > prior ? above", "above >= prior + 1 ? s_tdata[31:20]"),
        ("first_1 || growth > 14'sd63", "first_1"),
        ("first_1 || growth > 14'sd63", "growth > 14'sd63"),
        ("sum[e_id] >> e_shrink", "sum[e_id]"),
        ("    if (done) begin\n      seen <= '0;", "    if (done) begin"),
        ("assign s_tready = !closing", "assign s_tready = 1'b1"),
    ],
    "group_score": [
        ("product[47] ? product[47:24]", "product[47] ? product[46:23]"),
        ("spare = 3'(j)", "spare = 3'd0"),
        ("first <= last[2]", "first <= 1'b0"),
        ("field <= 0 ? 30'd0", "1'b0 ? 30'd0"),
    ],
    "score_scale": [
        ("ratio[79:52] != '0 ?", "1'b0 ?"),
        ("unit <= none", "unit <= 1'b0"),
        ("+ {1'b0, zeros}", "- {1'b0, zeros}"),
    ],
    "mix_out": [
        ("kept[35:0] != '0 || kept[37]", "kept[35:0] != '0"),
        ("kept <= zeros > 6'd31 ? tiny : normal", "kept <= normal"),
        ("exponent > 6'd30 || rounded[14:10] == 5'd31", "rounded[14:10] == 5'd31"),
        ("minus_1 ? out_1 -", "1'b0 ? out_1 -"),
    ],
    "key_packer": [("s_tvalid && (last ||", "s_tvalid && (1'b0 ||"), ("count <= last ? '0", "count <= 1'b0 ? '0")],
    "argtopk": [
        ("key[KEY_W-1] && !drop_sign && key", "key[KEY_W-1] && key"),
        ("&& key[KEY_W-2:0] != '0", ""),
        ("same_4 ? more_4", "1'b0 ? more_4"),
        ("same_5 ? more_5", "1'b0 ? more_5"),
        ("read[COUNT_W +: 2] == digit + 2'd1 ?", "1'b1 ?"),
        ("total_1) >= left", "total_1) > left"),
        ("{high_bin, bin_4}", "{bin_4, bin_4}"),
        ("if (collect_4) left <= left", "if (1'b0) left <= left"),
        ("kth) || recent_2[w];", "kth);"),
        ("index < {1'b0, old}", "index < {1'b0, count}"),
        ("(digit != 2'd0 || key", "(1'b1 || key"),
    ],
    "nfc_filter": [
        ("own[i] ? now : then_wanted", "now"),
        ("left <= RUN_W'(LANES)", "left < RUN_W'(LANES)"),
        ("ends && now && wanted[RUNS-1:1] == '0", "ends && now"),
        ("m_tvalid <= take && any", "m_tvalid <= take"),
        ("|(keep & own) ? run : run + 1'b1", "run"),
    ],
    "sparf_ctrl": [
        ("reg_l <= reg_k &&", ""),
        ("in_page == page_units - 1'b1 || all_ends", "in_page == page_units - 1'b1"),
        ("&& !(count == 2'd1 && step_1 && ends_1)", ""),
        ("rst || next", "rst"),
        ("first <= first + 16'(page_units)", "first <= first + 16'd1"),
        ("if (over) saw_over", "if (1'b0) saw_over"),
        ("row_valid && row_id == ID_W'(i)", "row_valid"),
        ("{19{top[12]}}", "19'd0"),
    ],
    "sparf_engine": [
        ("phase != SCORE || row_left > i", "1'b1"),
        ("(phase == SCORE ? r : k) - 1'b1", "k - 1'b1"),
        ("banks_full != 2'd2", "1'b1"),
        ("part_sum > part_all ? part_all : part_sum", "part_all"),
        ("mixing[6]", "mixing[5]"),
        (".row_valid(stats_valid && phase == KEYS)", ".row_valid(stats_valid && phase == SCORE)"),
        ("down < 13'd8 ? 5'd8 : down", "down < 13'd8 ? 5'd9 : down"),
        ("drain_inside && sum_left != 17'd1", "1'b1"),
        ("unit_take && N_W'(weighed) != r", "unit_take"),
    ],
}


def faults() -> Iterator[tuple[str, str, str]]:
    for module, pairs in FAULTS.items():
        for old, new in pairs:
            yield module, old, new


def tried(module: str, old: str, new: str) -> str:
    """Verdict of the test on a fault: caught, hangs, survived, or does not build. No fault ("") has to survive."""
    with tempfile.TemporaryDirectory() as folder:
        for source in SOURCES.glob("*.sv*"):
            shutil.copy(source, folder)
        path = Path(folder) / f"{module}.sv"
        text = path.read_text()
        if old:
            if text.count(old) != 1:
                return f"occurs {text.count(old)} times"
            path.write_text(text.replace(old, new))
        which = ["-k", "icarus"] if module != "sparf_engine" else ["-k", "two"]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *which,
            f"{HERE}/test_{module}.py",
        ]
        environment = {**os.environ, "VCSD_RTL": folder, "VCSD_REQUIRE": "icarus"}
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=TIMEOUT_S if old else TIMEOUT_S / 4)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the simulator too, which would go on for ever
            process.communicate()
            return "hangs"
    if process.returncode == 0:
        return "survived"
    return "caught" if f"cocotb tests of {module} failed" in said else "does not build"


def _state(module: str) -> str:
    """Hash of the files that a module's verdict depends on."""
    files = [
        *sources(module),
        *sorted(SOURCES.glob("*.py")),
        HERE / "rtl_bench.py",
        HERE / f"test_{module}.py",
    ]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(prog="./dev rtl --mutate", description=__doc__)
    parser.add_argument("--modules", nargs="*", choices=sorted(FAULTS), help="only these")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("-o", "--output", choices=("normal", "json"), default="normal")
    options = parser.parse_args()
    BUILDS.mkdir(exist_ok=True)
    memory = json.loads(MEMORY.read_text()) if MEMORY.exists() else {}
    modules = options.modules or FAULTS
    wanted = [fault for fault in faults() if fault[0] in modules]
    sound = [(module, "", "") for module in modules]

    def judge(fault: tuple[str, str, str]) -> str:
        key = " | ".join((*fault, _state(fault[0])))
        if key in memory:
            return memory[key]
        verdict = tried(*fault)
        if verdict in ("caught", "survived"):  # what else there is may be the machine's fault
            memory[key] = verdict
            MEMORY.write_text(json.dumps(dict(memory), indent=1))
        return verdict

    console = Console(stderr=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for what, part in (("sound modules", sound), ("faults", wanted)):
            done = pool.map(judge, part)
            verdicts = list(track(done, what, len(part), console=console, disable=not console.is_terminal))
            if part is sound and (bad := [m for m, v in zip(modules, verdicts, strict=True) if v != "survived"]):
                sys.exit(f"dev: without a fault, the tests of {', '.join(bad)} fail or take over {TIMEOUT_S // 4} s")
    caught = verdicts.count("caught") + verdicts.count("hangs")
    rows = [{"module": m, "fault": f"{a} -> {b}", "verdict": v} for (m, a, b), v in zip(wanted, verdicts, strict=True)]
    if options.output == "json":
        print(json.dumps({"faults": len(wanted), "caught": caught, "mutants": rows}, indent=2))
    else:
        table = Table("module", "fault", "verdict", title=f"{caught} of {len(wanted)} injected faults caught")
        for row in rows:
            table.add_row(*(value.replace("[", r"\[") for value in row.values()))
        Console().print(table)
    if caught != len(wanted):
        sys.exit("dev: faults that no test catches, or that are none: see the verdicts")


if __name__ == "__main__":
    main()
