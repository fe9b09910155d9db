"""Which tests are slow, and which of the slow ones CI leaves out; in which order they run.

Quick tests are those of README's command. Slow ones take seconds, or are the same in other worlds, with other dtypes or
libraries. CI runs both, but not the exhaustive ones, which repeat slow ones in still more worlds.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns))


# Folders and files whose tests take long: whole jobs, several hosts, MPI, random programs.
SLOW = (
    "bench",
    "benchmarks",
    "cluster",
    "conformance/test_array_kinds.py",
    "conformance/test_dry_calls.py",
    "conformance/test_floating_point_errors.py",
    "conformance/test_many_ranks.py",
    "core/test_command_lines.py",
    "core/test_init_automatic.py",
    "core/test_other_systems.py",
    "debug/test_stacks.py",
    "doctor",
    "examples",
    "faults/test_hang_reports.py",
    "faults/test_missing_ranks.py",
    "faults/test_resource_growth.py",
    "fuzz/test_calls.py",
    "fuzz/test_checkpoint_parsers.py",
    "fuzz/test_wrong_types.py",
    "launch/test_checkpoints_of_failing_ranks.py",
    "launch/test_elastic_nodes.py",
    "launch/test_error_files.py",
    "launch/test_job_status.py",
    "launch/test_meshrun_command.py",
    "launch/test_meshrun_failures.py",
    "launch/test_meshrun_signals.py",
    "launch/test_restarts_and_output.py",
    "launch/test_several_nodes.py",
    "launch/test_spawn.py",
    "launch/test_tls_jobs.py",
    "mpi",
    "network/test_wire_strangers.py",
    "reference_examples",
)
# Slow tests that stand beside quick ones, by patterns of their names.
SLOW_TESTS = _any_of(
    # autograd
    r"test_second_derivatives.*\[3\]",
    # checkpoint
    r"test_a_changed_byte_is_noticed_on_any_mesh\[(npy|zarr)",
    r"test_arrays_in_either_byte_order\[zarr",
    r"test_blocks_become_rows_on_every_mesh_and_for_every_save\[.*zarr",
    # compiled
    r"test_no_slot_is_written_before_it_is_read",
    r"test_strided_moves.*\[(9000|several chunks)\]",
    # conformance
    r"conformance/(?!test_(movement|messages)).*\[gloo-tcp-3",
    r"conformance/.*\[threads-2",
    r"conformance/test_(messages_that_do_not_fit|known_exchanges).*\[gloo-tcp",
    r"conformance/test_(movement|gather_scatter|messages).*\[threads-3-numpy",
    r"conformance/test_(reductions|movement|gather_scatter).*\[(threads-2|gloo-2|gloo-tcp-3)-numpy",
    r"test_(deadlines_name_what_is_there|ranks_that_all_send_first_learn_what_to_call)\[(threads|gloo-tcp)",
    r"test_long_reductions_apart.*(\[(threads|gloo-tcp)|shared|-1\])",
    r"test_long_reductions_apart.*::test_the_input_is_not_changed",
    r"test_many_in_flight\[threads-[34]",
    r"test_messages\.py.*\[gloo-tcp-3-numpy",
    r"test_messages_over_2_gib\[gloo",
    r"test_messages_that_do_not_fit.*\[gloo-.*-False\]",
    r"test_mixed_receives.*\[4-gloo-hosts",
    r"test_ranks_of_two_hosts_exchange_long_blocks",
    r"test_reductions.*\[threads-3-numpy",
    r"test_scans.*::test_small_arrays\[gloo-3-numpy",
    r"test_scans.*::test_small_arrays\[threads-3-numpy",
    r"test_scans.*\[(threads|gloo)-[12]",
    r"test_strided_messages.*::test_views_of_every_kind\[(threads-[12]|gloo-tcp)",
    # core
    r"test_(sync_calls_right_after_wait|thousands_in_flight)\[threads-3",
    r"test_a_killed_host_is_replaced",
    r"test_a_store_that_is_not_there_is_passed_over",
    r"test_another_group_name_at_one_file_is_told",
    r"test_any_departure_survives_the_way",
    r"test_asking_for_any_name_raises_nothing_else",
    r"test_dir_of_a_module_shows_its_api_alone\[(torch|dask|ray)",
    r"test_exchanges_of_changing_sizes.*\[(2-off|3)-",
    r"test_exit_without_destroy.*\[2-1",
    r"test_however_each_rank_calls_all_count.*\[(1000-|40-3|3-3)",
    r"test_init_refusals.*::test_(a_wrong_secret_is_told_to_those|a_stranger_does_not_end_the_wait)",
    r"test_lines_of_ranks_that_log_at_once_do_not_run_together",
    r"test_lists_of_unequal_arrays_go_in_every_way\[1000-3",
    r"test_lost_and_doubled_datagrams_do_no_harm\[2",
    r"test_memory_of_calls.*\[[14]0000-gloo-hosts",
    r"test_messages_both_ways_that_nobody_receives_end.*\[(threads|gloo-tcp)",
    r"test_moves_in_every_way.*-3-core\]",
    r"test_reductions_by_reading_are_the_same.*-3-core",
    r"test_single_copies.*core and Python\]",
    r"test_thousands_in_flight\[gloo-tcp-3",
    r"test_tuning.*::test_(all_ranks_choose_alike|all_ranks_begin_again|lists_of_unequal_arrays.*\[3|"
    r"a_slow_way|the_next_group)",
    r"test_tuning.*::test_(ranks_that_ask|what_ranks_measure_that_share_cores)",
    r"test_without_tuning_the_guess_is_kept",
    # debug
    r"test_circle_proof.*\[((1|2|18)-|0-Simulated)",
    # devices
    r"test_a_pipeline_sends_gpu_arrays.*\[1F1B-standin",
    r"test_arrays_live_until_the_call_is_done\[True",
    r"test_arrays_of_cupy.*::test_random_programs_are_those_of_numpy",
    r"test_arrays_on_several_gpus_of_a_rank\[float32-.*-3\]",
    r"test_arrays_whose_elements_lie_apart\[(True|F)-(complex128|uint64)",
    r"test_arrays_whose_elements_lie_apart\[True-(int16|bool|float32|bfloat16)",
    r"test_messages_that_nobody_receives_do_not_keep_a_group_open\[True\]",
    r"test_nccl_(streams|failures).*::test_(the_host_waits_where|memory_that_a_call_in_a_graph|a_rank_that)",
    r"test_nccl_collectives.*::test_(every_op|arrays_on_several_gpus_of_a_rank)\[(?!float32)",
    r"test_staged_devices.*::test_every_collective\[2",
    r"test_staged_devices.*::test_every_collective\[3",
    # docs
    r"test_migration_programs.*::test_program_prints_what_the_page_says",
    r"test_pages.*::test_program_prints_what_the_page_says",
    r"test_profiling_page",
    r"test_the_job_prints_what_the_readme_says",
    # faults
    r"faults/.*\[gloo-slots",
    r"faults/test_(awaited_i(sends|recvs)|cycles_beside_others|receives_from_anyone|send_circles|"
    r"wait_any_cycles).*[\[-]threads\]",
    r"faults/test_(killed_ranks|interrupts_and_timeouts|ctrl_c_in_every_wait).*\[gloo-(hosts|tcp)",
    r"faults/test_(rank_numbers|disagreements).*\[gloo-(tcp|hosts)",
    r"faults/test_awaited_i(sends|recvs).py::test_every_rank_raises.*\[(in_a_ring|of_a_known_kind)-",
    r"faults/test_killed_ranks.*-first call\]",
    r"test_a_rank_that_ends_early_with_status_0\[(_exit|destroys)",
    r"test_attach_finds_how_the_last_wait_of_a_rank_ended",
    r"test_awaited_isends.*\[(as_a_batch|to_both_sides|two_to_each)-",
    r"test_ctrl_c_in_every_wait.*-first call-",
    r"test_ctrl_c_in_every_wait.*-to another",
    r"test_destroyed_groups_leave_no_memory_behind\[gloo\]",
    r"test_every_rank_(raises_the_circle_once_it_is_proven\[each.*|sees_the_circle_at_the_timeout\[)",
    r"test_exit_reports",
    r"test_hang_attach.*::test_attach_(says_who|by_the_command_line)",
    r"test_hang_timing.*::test_(of_those_that_begin_to_wait_at_once_one_warns|"
    r"a_rank_that_was_told_nothing_finds_it_out)",
    r"test_interrupts_and_timeouts.*-first call\]",
    r"test_receives_from_anyone.*\[after_other_messages-",
    r"test_the_end_of_a_child_is_not_that_of_the_rank\[tcp",
    r"test_the_tags_of_the_messages_that_came_are_named\[(destroy-tcp|end-shared)",
    r"test_the_tags_of_the_messages_that_came_are_named\[end-tcp",
    r"test_wake_ups.*\[gloo-(long|of any)",
    r"test_who_gave_up_and_left_still_counts_as_having_come",
    r"test_who_waited_for_a_stopped_rank_waits_again",
    # fuzz
    r"test_a_topology_is_one_or_refused",
    # launch
    r"test_last_records",
    r"test_the_others_wait_no_longer_than_they_are_told",
    # mesh
    r"test_reduce_to_every_index_of_the_slice\[2x2x2",
    r"test_show\.py::test_(text_fits.*\[(60|200)|dots_for)",
    r"test_there_is_more_space_between_the_grids",
    # network
    r"test_calls_go_on_over_connections_that_were_reset\[\([01],\)",
    r"test_messages_during_the_first.*\[gloo-hosts",
    r"test_messages_during_the_first_collective\[gloo-tcp",
    # notebook
    r"test_a_worker_that_does_not_hear_an_interrupt_is_killed",
    r"test_an_interrupt_of_ranks_that_hang_shows_who_waits_for_whom",
    r"test_cell_magic.*::test_(a_notebook_interrupts|figures_are_shown)",
    r"test_cell_magic.*::test_the_same_timeout_of_several_ranks",
    r"test_drawings_are_shown_once_for_all_workers",
    r"test_other_workers_take_the_place_of_those_before",
    # shared_arrays
    r"shared_arrays/.*\[gloo-slots",
    r"test_shared_calls.*::test_four_ranks",
    r"test_sums_of_floats_do_not_depend_on_where_they_lie\[1200001",
    # store
    r"test_processes_lose_no_count",
    r"test_store_resumption.*\[in the clear",
    r"test_strangers_delay_nobody_and_are_hung_up_on_in_time",
    # tensor
    r"tensor/.*::test_(few_programs\[[234]|few_samples_of_many_ranks\[[23])",
    r"test_every_call_twice",
    r"test_one_of_the_layouts_exchanges_nothing\[(.*-threads|(map|np).*-gloo)",
    # topology
    r"test_wrong_files_are_refused.*asks for 270000",
    # several folders
    r"test_300_silent_slow_and_half_open_strangers",
    r"test_a_deadlock_(of_an_exchange_is_explained_once|is_told_in_full_by_one_rank)\[(threads|gloo-tcp)",
    r"test_all_texts_of_a_plot_can_be_read",
)
# Slow tests that repeat others.
EXHAUSTIVE = _any_of(
    # autograd
    r"test_random_programs_have_the_gradients_of_one_process\[12",
    # bench
    r"test_dtypes_and_ops\[(?!float16|bfloat16|complex64|bool)",
    r"test_dtypes_and_ops\[(complex64|bool)",
    r"test_every_collective_with_threads\[(in_place0-[13]|in_place1-4)\]",
    r"test_every_collective_with_threads\[in_place0-4",
    r"test_every_collective_with_threads\[in_place1-1\]",
    r"test_measuring_collectives.*::test_shared_arrays",
    r"test_plot\[\.svg",
    r"test_under_a_launcher_the_first_rank_alone.*\[options[12]",
    # benchmarks
    r"test_backends_of_torch_are_compared",
    r"test_benchmarks.*::(test_arrays_are_compared|test_data_parallel_training|"
    r"test_compare_measures_every_collective\[openmpi)",
    r"test_benchmarks.*::test_(a_library_that_is_missing|backend_mpi_is|sizes_that_ranks|several_numbers)",
    r"test_benchmarks.*::test_(between_hosts|the_start_on_two|cost_model_is|mesh_start)",
    r"test_benchmarks.*::test_(soak_finds_no_wrong_value|faults_are_noticed)\[(tcp|hosts)",
    r"test_benchmarks.*::test_(training_compares|startup_times|the_same_meshes|soak_finds|soak_over|"
    r"scaling|mesh_scale)",
    r"test_benchmarks.*\[(mpich|torch)\]",
    r"test_launched_script_works_with_each_library\[openmpi",
    # cluster
    r"test_bad_networks",
    r"test_everything_between_two_hosts\[\(1, 1\)",
    r"test_everything_between_two_hosts\[\(1, 2\)\]",
    r"test_faulty_links.*::test_calls_on_a_link_that_reorders_and_loses_packets",
    r"test_reset_links.*\[in the clear",
    r"test_torch_between_hosts",
    r"test_two_hosts.*::test_cut_cable",
    # compiled
    r"test_no_slot_is_written_before_it_is_read\[((even|none)-4|all-2|\w+-5)",
    r"test_no_slot_is_written_before_it_is_read\[all-4",
    r"test_no_slot_is_written_before_it_is_read\[even-2",
    # conformance
    r"conformance/(?!test_(reductions|messages)).*\[gloo-slots-3",
    r"conformance/(?!test_(reductions|movement|messages)).*\[mpi-",
    r"conformance/(?!test_(reductions|movement|messages|groups)).*\[gloo-hosts",
    r"conformance/.*\[((threads|gloo|gloo-slots)-5|gloo-slots-[12]|mpi-mpich)\b",
    r"conformance/.*\[gloo-1\b",
    r"conformance/.*\[threads-2\b",
    r"conformance/test_(movement|messages).*\[mpi-",
    r"conformance/test_(reductions|movement|gather_scatter).*\[(gloo-hosts-4|gloo-tcp-3)-numpy",
    r"test_many_ranks.*\[gloo-slots",
    r"test_many_ranks.*\[gloo-tcp",
    r"test_messages_over_2_gib\[gloo",
    r"test_messages_that_do_not_fit.*\[gloo-(tcp|.*-False\])",
    r"test_reductions.*(\[gloo-hosts|::test_reduce_scatter\[mpi-)",
    r"test_reductions.*::test_(?!(all_reduce|reduce|reduce_scatter_tensor|undefined_\w+)\[)\w+\[mpi-",
    r"test_reductions.*::test_(reduce_scatter|all_reduce|reduce)\[gloo-slots-3",
    r"test_reductions.*::test_(reduce|reduce_scatter|reduce_scatter_tensor)\[threads-3-numpy",
    r"test_reductions.*::test_reduce\[mpi-",
    r"test_scans.*::test_small_arrays\[gloo-tcp-3-numpy",
    # core
    r"core/.*\[.*mpi-openmpi",
    r"test_lines_of_ranks_that_log_at_once",
    r"test_thousands_in_flight\[threads-3",
    r"test_what_ranks_measure_that_share_cores_with_others",
    r"test_worlds_harness.*::test_any_directories",
    # dask_clusters
    r"test_dask_jobs.*::test_a_stuck_worker_is_left_out",
    # devices
    r"test_mpi_passing.*\[mpi-mpich",
    # differential
    r"test_same_as_torch.*-(threads|gloo-slots|gloo-tcp)\]",
    r"test_same_as_torch.*\[programs_movement",
    r"test_same_as_torch.*\[programs_reductions.(reduce|reduce_scatter)-",
    r"test_same_as_torch.*\[programs_reductions.reduce_scatter_tensor-",
    # docs
    r"test_notebooks.*\[(choosing_a_mesh|pipelines)",
    r"test_notebooks.*\[(transformer|numpy_on_four_ranks)",
    r"test_torchrun_starts_the_same_program\[standalone(0-variables1|1-variables0)",
    r"test_torchrun_starts_the_same_program\[standalone1",
    # examples
    r"test_classic_script_prints_the_same_under_torch",
    r"test_classic_script_prints_the_same_with_torch_arrays",
    r"test_every_mesh_computes_the_run_of_one_rank\[(2x1x1-\]|1x2x1-\]|1x2x2-\]|2x2x1---zero)",
    r"test_float32_stays_near_the_run_of_one_rank",
    r"test_it_agrees_with_one_process\[(kmeans|nbody|fft_pencils|matmul|heat_2d_arrays)",
    r"test_the_mesh_may_have_any_sides\[6-",
    r"test_train_digits.*\[float32",
    r"test_train_digits.*\[float64-(2x1|1x2|4x1|1x4)",
    r"test_train_transformer.*\[(1x1x2|2x1x2)",
    # faults
    r"faults/(?!test_(resource_growth|ctrl_c|rank_numbers|disagreements)).*\bgloo-tcp(?!.*-connected)",
    r"faults/.*\[gloo-slots",
    r"faults/test_(awaited_i(sends|recvs)|cycles_beside_others|receives_from_anyone).*[\[-]threads\]",
    r"faults/test_(awaited_isends|cycles_beside_others|receives_from_anyone|wait_any_cycles|"
    r"send_circles).*\bgloo-hosts\]",
    r"faults/test_(ctrl_c_in_every_wait|exit_reports.*-unmet)",
    r"faults/test_(rank_numbers|disagreements|interrupts_and_timeouts|call_positions).*\bgloo-tcp-",
    r"test_(destroyed_groups_leave_no_memory|50_worlds).*\[gloo-tcp",
    r"test_500_groups_that_are_all_kept\[gloo\]",
    r"test_64_ranks_that_are_stuck",
    r"test_awaited_i(sends|recvs).*::test_as_long_as",
    r"test_awaited_irecvs.*::test_who_leaves_the_wait_by_ctrl_c.*\[gloo-hosts\]",
    r"test_awaited_isends.*::test_who_leaves_the_wait_by_ctrl_c.*\[gloo\]",
    r"test_calls_whose_shapes_never_repeat.*\[4-gloo-hosts",
    r"test_wait_any_cycles.*::test_as_long_as.*\[threads",
    # fuzz
    r"fuzz/test_calls.*\[(2-gloo|3-(gloo-slots|gloo-hosts|threads))",
    r"fuzz/test_calls.*\[(2-threads|3-gloo-tcp)",
    r"test_zarr_metadata_are_read_or_refused",
    # launch
    r"test_a_missing_destroy_is_told.*\[(?!-True)",
    r"test_a_rank_that_is_ended_is_no_failure_whatever_its_clock",
    r"test_a_save_in_progress.*\[(raise.*-True|sys.*rank == 1)",
    r"test_a_save_that_fails_at_the_end.*\[(?!\])",
    r"test_a_traceback_ends_at_the_call\[(?!load\])",
    r"test_a_traceback_ends_at_the_line_of_the_user\[(keyword of|async|between)",
    r"test_an_exception_comes_first\[sys",
    r"test_meshrun_signals.*::test_ctrl_c_on_a_job_that_hangs.*\[1\.0",
    r"test_program_that_ends_without_join\[False",
    r"test_several_nodes.*::test_(killed_launcher|signal_to_one_launcher)_ends_all_hosts.*\[1\]",
    r"test_sigterm_on_a_job_that_hangs.*\[True",
    r"test_spawn\.py.*\[forkserver",
    # mesh
    r"test_all_texts_of_a_plot_can_be_read\[shape[0-24]",
    r"test_large_html_and_plots",
    # mpi
    r"test_ctrl_c_on_a_job_that_hangs_names_the_absent_rank_alone\[(openmpi-gloo|mpich-mpi)",
    r"test_ctrl_c_on_a_job_that_hangs_names_the_absent_rank_alone\[mpich",
    r"test_mpi_jobs.*::test_ranks_that_name_.*-False",
    r"test_mpi_jobs.*::test_under_meshrun.*-((script-after|module-before) MPI|script-before MPI.*too early'\))",
    r"test_mpi_jobs.*::test_under_meshrun.*-sys\.exit.*-script",
    r"test_mpi_jobs.*::test_under_meshrun.*too early'\)-module",
    r"test_mpi_jobs.*\[mpich\b",
    # notebook
    r"test_a_worker_that_does_not_hear_an_interrupt",
    # package
    r"test_package.*::test_a_wheel_with_the_core_is_for_this_platform",
    r"test_package.*\[1[23]\]",
    r"test_the_core_is_compiled_by_every_python",
    # ray_backend
    r"ray_backend/(?!test_ray_jobs)",
    # reference_examples
    r"reference_examples/(?!test_debug).*\[(.*-)?[23](-ranks.*)?\]",
    r"test_debug_examples.*\[[24](-ranks.*)?\]",
    r"test_launch_examples.*::test_(a_spawn_on_each_node|spawns_with_secrets_of_their_own.*)\[tcp",
    r"test_launch_examples.*::test_(spawn\[tcp|a_wrong_secret_on_one_node.*\[different)",
    r"test_launch_examples.*::test_a_wrong_secret_on_one_node_is_an_error.*\[missing on the first",
    r"test_launch_examples.*\[file:",
    # tensor
    r"tests/tensor/(?!test_random_programs)",
    # topology
    r"test_plan_at_8192_ranks",
    # torch_backend
    r"test_a_launcher_starts_the_script",
    r"test_same_as_gloo.*-3\]",
    # several folders
    r"test_(accounting|subgroups|flight_recorder).*\[mpi-",
    r"test_300_silent_slow_and_half_open",
    r"test_300_strangers_that_begin_tls_and_are_silent_delay_nobody",
    r"test_libraries",
    r"test_many_groups.*\[mpi-mpich",
    r"test_training_gives_the_losses_of_gloo",
)
# Folders whose slow tests stand beside quick ones. Of the sets of parameters of each test, CI runs the first for each
# backend; the others are exhaustive as well.
SAMPLED = (
    "autograd",
    "checkpoint",
    "compiled",
    "conformance",
    "core",
    "debug",
    "devices",
    "faults",
    "fuzz",
    "network",
    "parallel",
    "profiler",
    "shared_arrays",
    "store",
    "tensor",
)
_BACKEND = re.compile(r"[\[-](threads|gloo(?:-(?:slots|tcp|hosts))?|mpi-\w+)\b")
# Files whose few tests take long. They begin first, so that no process has one to run when the others are done.
FIRST = (
    "ray_backend/test_ray_jobs.py",
    "docs/test_site.py",
    "tensor/test_random_programs.py",
    "docs/test_notebooks.py",
    "launch/test_elastic_nodes.py",
    "package/test_package.py",
    "cluster/test_reset_links.py",
    "cluster/test_gloo_between_hosts.py",
    "faults/test_hang_reports.py",
    "docs/test_migration_programs.py",
    "cluster/test_two_hosts.py",
    "torch_backend/test_torch_suite.py",
    "torch_backend/test_worlds_and_meshes.py",
    "core/test_tuning.py",
    "examples/test_elastic_training.py",
    "cluster/test_lost_store.py",
    "compiled/test_sanitizers.py",
)
_IN_SLOW_PLACE = re.compile(f"(?:{'|'.join(map(re.escape, SLOW))})(?:/|$)")


@functools.cache  # a process asks for 17,000 tests, which are in 390 files
def _is_in_slow_place(path: Path) -> bool:
    return path.is_relative_to(_TESTS) and _IN_SLOW_PLACE.match(path.relative_to(_TESTS).as_posix()) is not None


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests that are slow, that need torch, and that are exhaustive."""
    sampled = set()
    for item in items:
        runs_mpi = "mpi-openmpi" in item.name or "mpi-mpich" in item.name  # ranks of MPI spin
        if runs_mpi or _is_in_slow_place(item.path) or SLOW_TESTS.search(item.nodeid):
            item.add_marker("slow")
        if {"torch", "torch_worlds"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("torch")
        marks = {mark.name for mark in item.iter_markers()}
        if "exhaustive" in marks or marks.isdisjoint({"slow", "torch"}):
            continue
        is_exhaustive = EXHAUSTIVE.search(item.nodeid)
        if not is_exhaustive and item.path.relative_to(_TESTS).parts[0] in SAMPLED:
            test = item.nodeid.partition("[")[0]
            backend = _BACKEND.search(item.nodeid, len(test))
            sample = test, backend and backend[1]
            is_exhaustive = sample in sampled
            sampled.add(sample)
        if is_exhaustive:
            item.add_marker("exhaustive")


def sort(items: list[pytest.Item]) -> None:
    """Sort tests for processes that take a file at a time."""
    num_tests = Counter(item.path for item in items)
    first = {_TESTS / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: (first.get(item.path, len(first)), -num_tests[item.path]))
