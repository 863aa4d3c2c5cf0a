"""Mutants of planner, train, cli and testing."""

from mutation.mutant import Mutant

MUTANTS = [
    Mutant(
        "planner/memory.py",
        "        if shares and made - sent >= BUCKET_NBYTES:\n",
        "        if False:\n",
        "planner/test_memory.py",
        "messages of gradients take no memory",
    ),
    Mutant(
        "planner/memory.py",
        "            found[-2 - len(self.network.layers) - number] = self._of_others(number)\n",
        "            pass\n",
        "planner/test_memory.py",
        "gathered channels are not kept",
    ),
    Mutant(
        "planner/workspace.py",
        "(-(-channels // BLOCK) * BLOCK)",
        "channels",
        "planner/test_memory.py",
        "blocks of channels have no channels too many",
    ),
    Mutant(
        "planner/read_network.py",
        '        op = None if kwargs.get("out") is not None else OPS.get(func)\n',
        "        op = OPS.get(func)\n",
        "planner/test_read_network_errors.py",
        "rules are asked to read out=",
    ),
    Mutant(
        "train/checkpoints.py",
        "    write_manifest(replace(manifest, files=files), beside)\n"
        '    target = beside.with_suffix("")\n'
        "    replaced = target.with_suffix(REPLACED)\n"
        "    with explained_writing(target):\n"
        "        sync_folder(beside)\n"
        "        if target.exists():\n"
        "            shutil.rmtree(replaced, ignore_errors=True)\n"
        "            target.rename(replaced)\n"
        "        beside.rename(target)\n",
        '    target = beside.with_suffix("")\n'
        "    replaced = target.with_suffix(REPLACED)\n"
        "    with explained_writing(target):\n"
        "        sync_folder(beside)\n"
        "        if target.exists():\n"
        "            shutil.rmtree(replaced, ignore_errors=True)\n"
        "            target.rename(replaced)\n"
        "        beside.rename(target)\n"
        "        write_manifest(replace(manifest, files=files), target)\n",
        "train/test_checkpoints.py",
        "a checkpoint gets its name before its manifest is written",
    ),
    Mutant(
        "train/checkpoints.py",
        "        sync_folder(target.parent)\n",
        "",
        "train/test_checkpoints.py",
        "a checkpoint whose save has returned may have no name on the disk",
    ),
    Mutant(
        "train/checkpoint_folder.py",
        "storage_writer=PlainWriter(folder, sync_files=True)",
        "storage_writer=PlainWriter(folder, sync_files=False)",
        "train/test_checkpoints.py",
        "a checkpoint's tensors are written without fsync",
    ),
    Mutant(
        "train/checkpoints.py",
        "kept = {*latest, *(best_of(found, until=step) for step in latest)}",
        "kept = {*latest}",
        "train/test_checkpoints.py",
        "the best checkpoint is removed with the old ones",
    ),
    Mutant(
        "train/checkpoints.py",
        "[self._mesh.rank :: self._mesh.num_ranks]",
        "[self._mesh.rank : self._mesh.rank + 1]",
        "train/test_checkpoints.py",
        "only as many files as there are ranks are checked",
    ),
    Mutant(
        "train/checkpoints.py",
        "        if error is not None:\n            raise error\n",
        "        if error is not None:\n            self._best = None\n",
        "train/test_checkpoints.py",
        "nobody hears that a checkpoint could not be written",
    ),
    Mutant(
        "train/run_folder.py",
        "        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)\n",
        "train/test_run_folder.py",
        "two runs can hold a folder's lock",
    ),
    Mutant(
        "train/checkpoint_state.py",
        "return entries if isinstance(state, list) else {TUPLE: entries}",
        "return entries",
        "train/test_checkpoints.py",
        "tuples come back as lists",
    ),
    Mutant(
        "train/optimizers.py",
        "(epochs + 1 / self.steps_per_epoch) / warmup",
        "epochs / warmup",
        "train/test_optimizers.py",
        "the first step of a warm-up learns nothing",
    ),
    Mutant(
        "train/optimizers.py",
        "/ max(end - warmup, 1 / self.steps_per_epoch)",
        "/ max(end, 1 / self.steps_per_epoch)",
        "train/test_optimizers.py",
        "decay does not reach its end by the end",
    ),
    Mutant(
        "train/metrics.py",
        "self.spread + spread + apart**2 * (self.weight * added / total)",
        "self.spread + spread",
        "train/test_metrics.py",
        "the spread between batches is lost from R2",
    ),
    Mutant(
        "train/metrics.py",
        "reduce_sum(counts.to(labels.device), labels.mesh, labels.layout.axes)",
        "reduce_sum(counts.to(labels.device), labels.mesh, labels.mesh.grid.long_axes)",
        "train/test_metrics.py train/test_task.py",
        "cells are counted once for each rank that holds them",
    ),
    Mutant(
        "train/task.py",
        "            part.training = mode\n",
        "            part.training = True\n",
        "train/test_task.py train/test_run.py",
        "after a validation frozen layers train",
    ),
    Mutant(
        "train/optimizers.py",
        '{"params": others, "weight_decay": 0.0}',
        '{"params": others}',
        "train/test_optimizers.py",
        "biases and scales of norms decay",
    ),
    Mutant(
        "train/losses.py",
        "_overlap(chance * counted, truth.to(chance.dtype))",
        "_overlap(chance, truth.to(chance.dtype))",
        "train/test_losses.py",
        "ignored cells count in Dice",
    ),
    Mutant(
        "train/losses.py",
        "return _ratio((each * beside(weight, each)).sum() / num_cells, weight.sum())",
        "return (each * beside(weight, each)).mean()",
        "train/test_losses.py",
        "weights of samples scale the loss",
    ),
    Mutant(
        "train/loop.py",
        "sign = 1 if self.task.higher_is_better else -1",
        "sign = 1",
        "train/test_task.py train/test_run.py",
        "the worst weights are kept as the best where less is better",
    ),
    Mutant(
        "train/loop.py",
        '        set_random_state(values["random"])\n',
        "",
        "train/test_run.py train/test_checkpoints.py",
        "a run goes on with other random numbers",
    ),
    Mutant(
        "train/loop.py",
        "            foreach_div_([p.grad for p in parameters if p.grad is not None],"
        " passes.count)\n",
        "",
        "train/test_run.py",
        "accumulated gradients are not divided by what they count",
    ),
    Mutant(
        "train/recorder.py",
        'if line["step"] <= step]',
        'if line["step"] < step]',
        "train/test_recorder.py",
        "the log loses the line of the step that a run goes on from",
    ),
    Mutant(
        "cli/local_ranks.py",
        "return self.code not in (0, CAN_GO_ON)",
        "return self.code != 0",
        "cli/test_local_ranks.py",
        "a rank that stopped well for a signal counts as failed",
    ),
    Mutant(
        "cli/local_ranks.py",
        "return {name: each for name, each in environ.items()"
        ' if not name.startswith("TORCHELASTIC_")}',
        "return dict(environ)",
        "cli/test_local_ranks.py",
        "ranks look for the agent of an outer torchrun",
    ),
    Mutant(
        "cli/local_ranks.py",
        "self._send(signal.SIGKILL if group in self.asked else signal.SIGTERM, group)",
        "self._send(signal.SIGTERM, group)",
        "cli/test_local_ranks.py",
        "a rank that ignores SIGTERM is never killed",
    ),
    Mutant(
        "cli/local_ranks.py",
        "if asked % product or (is_fixed and asked != product):",
        "if asked % product:",
        "cli/test_train.py",
        "more ranks than a fixed mesh has are started",
    ),
    Mutant(
        "cli/rank_errors.py",
        "    if len(ranks) == 1 and len(errors) == num_ranks:\n",
        "    if len(ranks) == 1:\n",
        "cli/test_local_ranks.py cli/test_train.py",
        "an error of one rank is told as if all had it",
    ),
    Mutant(
        "cli/rank_errors.py",
        "    if own and not any(ending.code < 0 for ending in silent):\n",
        "    if own:\n",
        "cli/test_local_ranks.py cli/test_train.py",
        "a rank that was killed is not told before what came of it",
    ),
    Mutant(
        "cli/data_options.py",
        "found += range(int(first), int(last or first) + 1)",
        "found += range(int(first), int(last or first + '1'))",
        "cli/test_data.py",
        "a range of samples leaves out its end",
    ),
    Mutant(
        "cli/train.py",
        'folder = folder or config.run.folder or f"runs/{config_name(source)}"',
        'folder = config.run.folder or folder or f"runs/{config_name(source)}"',
        "cli/test_train.py",
        "--run does not override the configuration",
    ),
    Mutant(
        "cli/selftest.py",
        "name: value for name, value in environ.items() if not name.startswith(LAUNCHER_VARIABLES)",
        "name: value for name, value in environ.items()",
        "cli/test_selftest.py cli/test_doctor.py",
        "the self-test takes the variables of a launcher along",
    ),
    Mutant(
        "testing/compare.py",
        '            close(ours.grad, serial.grad, f"gradient of weight {number}")\n',
        "            pass\n",
        "testing/test_compare.py",
        "weight gradients are not compared",
    ),
    Mutant(
        "testing/compare.py",
        "        coefficients = seeded(*serial_out.shape, seed=1).to(serial_out.detach())\n",
        "        coefficients = torch.ones_like(serial_out)\n",
        "testing/test_compare.py",
        "all outputs weigh the same in the loss",
    ),
    Mutant(
        "testing/team.py",
        "        if not self._processes.complete:\n            self._kill()\n",
        "",
        "testing/test_team.py",
        "a team goes on with a dead rank",
    ),
    Mutant(
        "testing/rank_processes.py",
        "return isinstance(outcome, Raised), outcome.when if isinstance(outcome, Raised) else 0.0",
        "return isinstance(outcome, Raised), float(rank)",
        "testing/test_team.py",
        "the lowest rank that raised is told rather than the first",
    ),
    Mutant(
        "testing/messages.py",
        "for each in reversed(tuple(filters)):",
        "for each in tuple(filters):",
        "testing/test_messages.py",
        "the caller's last warning filter counts rather than the first",
    ),
    Mutant(
        "testing/sweep/trial.py",
        "        if not why and (unlike := _unlike(mine, theirs)):\n"
        '            why = f"gradient of input',
        "        if not why and (unlike := ''):\n            why = f\"gradient of input",
        "testing/test_sweep.py::test_a_wrong_rule_is_found"
        " testing/test_sweep.py::test_a_rule_may_be_right",
        "the sweep does not compare gradients",
    ),
    Mutant(
        "train/tournament/offer.py",
        "rank = min(ranks, key=ends.__getitem__) if is_shared else 0\n",
        "rank = 0\n",
        "train/test_tournament.py::test_every_box_is_laid_out_once"
        " train/test_tournament.py::test_models_move_between_unlike_meshes_and_cut_weights",
        "pieces that rank 0 does not hold are laid out by it",
    ),
    Mutant(
        "train/tournament/match.py",
        "            copies = {name: tensor.clone() for name, tensor in inbox.items()}\n",
        "            copies = dict(inbox)\n",
        "train/test_tournament.py",
        "moments that were taken over change when the next model arrives",
    ),
    Mutant(
        "train/tournament/tournament.py",
        '        self.others.post("done", number)  # also who gave up reads no more\n',
        "",
        "train/test_tournament.py",
        "who gave a match up is waited for by the one who came late",
    ),
    Mutant(
        "train/tournament/rules.py",
        "    if not math.isfinite(score):\n        return False\n",
        "",
        "train/test_tournament.py",
        "a score of minus infinity wins",
    ),
    Mutant(
        "train/tournament/rules.py",
        "found[name] = _within(values[name] * (factor if up else 1 / factor), low, high)",
        "found[name] = values[name] * (factor if up else 1 / factor)",
        "train/test_tournament.py",
        "hyperparameters leave their range",
    ),
    Mutant(
        "train/tournament/shares.py",
        "        drawn = drawn[trainer * size : (trainer + 1) * size]\n",
        "        drawn = drawn[trainer * size : (trainer + 2) * size]\n",
        "train/test_tournament_run.py",
        "trainers share samples, and learn from what others hold out",
    ),
    Mutant(
        "store/computed.py",
        "enumerate(samples[span.start : span.stop])",
        "enumerate(samples[: span.stop - span.start])",
        "store/test_computed.py",
        "ranks keep codes under the names of other samples",
    ),
    Mutant(
        "models/stacked.py",
        "torch.rand_like(x) >= share",
        "torch.rand_like(x) < share",
        "models/test_stacked.py",
        "noise keeps what it should remove",
    ),
    Mutant(
        "train/staged_run.py",
        "        _begin_at(trainer.loader, stage.first_epoch)\n",
        "",
        "train/test_staged_run.py",
        "a stage begins at epoch 0 again",
    ),
    Mutant(
        "train/stages.py",
        "(1 - rho) * ((1 - rho) / (1 - mean)).log()",
        "(1 - rho) * ((1 - rho) / mean).log()",
        "train/test_stages.py",
        "the penalty of units that fire too often is another",
    ),
    Mutant(
        "models/stacked.py",
        "self.average(x * x) - mean * mean",
        "self.average(x * x)",
        "models/test_stacked.py",
        "deviations are not around the mean",
    ),
    Mutant(
        "models/stacked.py",
        "        init_glorot(self, bias=0.0)\n        self._silence()\n",
        "        init_glorot(self, bias=0.0)\n",
        "models/test_stacked.py",
        "a head begins with drawn weights",
    ),
    Mutant(
        "train/optimizers.py",
        "lr * group.get(FACTOR, 1.0)",
        "lr",
        "train/test_optimizers.py",
        "an encoder learns as fast as its head",
    ),
    Mutant(
        "nn/parallel/meta_weights.py",
        "in part.modules() if child is not part",
        "in part.children()",
        "nn/parallel/test_meta_weights.py",
        "what lies deeper than a child is not drawn by the rule of the module around it",
    ),
    Mutant(
        "train/labelled.py",
        "places[mine] = (np.arange(len(mine)) + 0.5) / len(mine)",
        "places[mine] = np.arange(len(mine))",
        "train/test_labelled.py",
        "rare classes get more than their share of the labels",
    ),
]
