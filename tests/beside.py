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
        collectives ddp dp fsdp gathers hooks replicas traffic virtual
    """,
    "report": """
        answers bars boards build_report capacity cells colors content figures intervals
        large_page large_reports markdown markup numbers page parity_report
        report_command scaling tables waterfall whereabouts
    """,
    "sinks": """
        sink_csv sink_facts sink_tensorboard sink_timeline
    """,
    "": """
        accumulation anatomy anatomy_buckets anatomy_models arrays bad_command_lines
        bad_input batch_search batches beside brought build calibration
        calibration_restores careful carried causes check check_measuring check_sinks
        check_workloads checkpoint checkpoint_commands clusters_page collate
        comm_recorder comm_times compare comparing compose composing config contrast
        cuda cut device docs env env_slurm equality errors evaluate experiments
        exposure extra_work extras failures feed files full_disk gpt hosts inspect
        job_config judge launched_ranks launchers leftover loading losses lost_cells
        many_ranks masking meeting metrics models network nodes nvml odd_text one_queue
        open_ports optimizers outlets own_script packaging pairing parity plan
        plan_workloads precision preload prepare provenance publishing rates ray_cells
        records reference repeating repeats restarting results resume resuming rounds
        run_folder scale schedule shapes slurm_jobs slurm_reasons slurm_requests
        soundness stats stragglers streams sweep synthetic texts tolerance tracing
        training transfer tutorial two_agents uncertainty uncut weights wire
    """,
}
MODULES = frozenset(
    TESTS / folder / f"test_{name}.py" for folder, names in NAMES.items() for name in names.split()
)
