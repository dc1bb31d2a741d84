"""The modules whose tests may run beside others: `make test` runs two of them at a time.

They find the same on a busy machine as on a quiet one. A module that measures time, has a short
limit for what it waits for or looks at the whole machine is not one of them; tests/test_beside.py
looks for what such modules use. A module that is not named here runs alone.
"""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent

# By folder; each name without its "test_".
NAMES = {
    "browser": """
        board_tabs browser report_page
    """,
    "events": """
        ended event_file hparams layout
    """,
    "extras": """
        hub launcher_plugins library_models trackers vision
    """,
    "parallel": """
        ddp dp fsdp hooks replicas virtual
    """,
    "report": """
        answers bars boards build_report capacity cells colors content figures intervals
        large_page large_reports markdown markup numbers page parity_report
        report_command scaling tables waterfall
    """,
    "sinks": """
        sink_csv sink_facts sink_tensorboard sink_timeline
    """,
    "": """
        accumulation anatomy anatomy_buckets anatomy_models arrays bad_command_lines
        bad_input batch_search batches brought build calibration calibration_restores
        careful causes check check_measuring check_sinks check_workloads collate
        comm_recorder comm_times comparing compose composing config contrast cut device
        env equality errors evaluate experiments exposure extra_work extras failures
        feed files full_disk gpt inspect job_config judge launched_ranks launchers
        leftover loading losses many_ranks masking metrics models network nvml
        odd_text one_queue optimizers packaging pairing parity plan plan_workloads
        precision preload prepare provenance publishing rates records reference
        repeating repeats results resume resuming run_folder scale schedule shapes
        soundness stats stragglers streams sweep synthetic tolerance tracing training
        transfer tutorial uncertainty uncut weights wire
    """,
}
MODULES = frozenset(
    TESTS / folder / f"test_{name}.py" for folder, names in NAMES.items() for name in names.split()
)
