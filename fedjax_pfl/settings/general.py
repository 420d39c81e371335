"""The settings of every run, whatever its method: one row says all that is known of each.

Those of a transform are rows of its own file.
"""

from fedjax_pfl import transforms
from fedjax_pfl.core.optimizers import OPTIMIZERS, SCHEDULES
from fedjax_pfl.core.setting import Setting

STORES = ("auto", "device", "sharded", "host", "disk")

_OURS = tuple(OPTIMIZERS)  # which a rate is given to; a caller's own has one inside

GENERAL: dict[str, dict[str, Setting]] = {
    "What is trained": {
        "algorithm": Setting(
            "fedavg", "the method; its own settings lie under its name", per_phase=True
        ),
        "model": Setting("small", "the network, likewise", per_phase=True),
        "task": Setting("auto", "what is learned; auto: by the type of the labels"),
        "metrics": Setting(
            "",
            "scores, of which the first chooses the best round: accuracy,macro_f1; unset: the "
            "task's own",
        ),
        "zero_head": Setting(
            False,
            "the last layer starts at zero, so that no order of labels is preferred",
            per_phase=True,
        ),
        "groups": Setting(
            (), "settings of networks, as many as there are architectures; clients in turn"
        ),
        "phases": Setting(
            (),
            "settings that change in each part of a run; a part begins with what the one "
            "before has trained",
        ),
    },
    "Data": {
        "dataset": Setting(
            "digits", "the examples; their own settings lie under their name", defines_data=True
        ),
        "data_dir": Setting(
            str,
            "the folder of prepared tfds datasets; unset: TFDS_DATA_DIR",
            resumable=True,
            per_process=True,
        ),
        "fraction": Setting(
            1.0,
            "share of the dataset that is used at all, drawn at random",
            above=0,
            high=1,
            defines_data=True,
        ),
        "partition": Setting(
            "classes", "who holds what; its own settings lie under its name", defines_data=True
        ),
        "partition_seed": Setting(
            0,
            "of all that is random in who holds what, apart from `seed`",
            low=0,
            defines_data=True,
        ),
        "split": Setting(
            "pooled",
            "where test examples come from: a part of each client's own (pooled), the "
            "dataset's own test set (official), or one part for all clients (shared)",
            choices=("pooled", "official", "shared"),
            defines_data=True,
        ),
        "test_fraction": Setting(
            0.3,
            "share of examples for testing; official: not read",
            low=0,
            below=1,
            defines_data=True,
        ),
        "validation_fraction": Setting(
            0.0,
            "share for validation, by which a run's best round is chosen; 0: there is none",
            low=0,
            below=1,
            defines_data=True,
        ),
        "validation_examples": Setting(
            int,
            "so many in place of the share, where split is official or shared",
            low=1,
            defines_data=True,
        ),
        "permute_labels": Setting(
            False, "give every client a random numbering of the classes", defines_data=True
        ),
        "augment": Setting(False, "random crops, flips, colours and gray in training; images only"),
    },
    "Clients and rounds": {
        "clients": Setting(10, "how many the examples are given to", low=1, defines_data=True),
        "held_out": Setting(
            0, "so many of them, the last, are evaluated and do not train", low=0, defines_data=True
        ),
        "participants": Setting(
            "active",
            "who trains: active; in a later phase held_out",
            choices=("active", "held_out"),
            per_phase=True,
        ),
        "clients_per_round": Setting(
            int,
            "how many are drawn for a round; unset: all",
            low=1,
            per_phase=True,
            sets_participation=True,
        ),
        "rounds": Setting(
            50,
            "how often clients are drawn, train and upload",
            low=1,
            per_phase=True,
            budget=True,
            sets_participation=True,
        ),
        "dropout": Setting(
            0.0,
            "chance that a client which has downloaded and trained is not heard of again",
            low=0,
            below=1,
        ),
    },
    "Local training": {
        "local_epochs": Setting(
            int,
            "passes over a client's own examples in a round; unset, as local_steps is: 1",
            low=1,
            per_phase=True,
            tunable=True,
        ),
        "local_steps": Setting(
            int,
            "batches in a round instead, as many for every client",
            low=1,
            per_phase=True,
            tunable=True,
        ),
        "batch_size": Setting(
            32, "examples of a gradient step", low=1, per_phase=True, tunable=True
        ),
        "drop_last": Setting(
            False,
            "leave out the short batch at the end of an epoch, unless it is the only one: "
            "with BatchNorm, which normalises by what is in a batch, one or two can cost accuracy",
            per_phase=True,
            tunable=True,
        ),
        "optimizer": Setting(
            "sgd",
            "what makes clients' steps of gradients: sgd, adam, adamw, adagrad or rmsprop",
            per_phase=True,
            tunable=True,
        ),
        "learning_rate": Setting(
            0.01,
            "of the clients' optimiser",
            above=0,
            per_phase=True,
            sweepable=True,
            tunable=True,
            used_with=("optimizer", _OURS),
        ),
        "learning_rate_schedule": Setting(
            "constant",
            "what it is multiplied by, as in optax.schedules: constant, linear, cosine_decay, "
            "exponential_decay, warmup_constant or warmup_cosine_decay",
            choices=("constant", *SCHEDULES),
            per_phase=True,
            tunable=True,
            used_with=("optimizer", _OURS),
        ),
        "schedule_over": Setting(
            "rounds",
            "what that runs over: the rounds of a phase, or the steps of a client's visit",
            choices=("rounds", "steps"),
            per_phase=True,
            tunable=True,
            used_with=("learning_rate_schedule", tuple(SCHEDULES)),
        ),
        "schedule_end": Setting(
            0.01,
            "share of learning_rate at its end and, where there is a warm-up, at its beginning",
            low=0,
            high=1,
            per_phase=True,
            tunable=True,
            used_with=("learning_rate_schedule", tuple(SCHEDULES)),
        ),
        "schedule_warmup": Setting(
            0.1,
            "share of it in which the rate rises to learning_rate",
            low=0,
            below=1,
            per_phase=True,
            tunable=True,
            used_with=("learning_rate_schedule", ("warmup_constant", "warmup_cosine_decay")),
        ),
        "learning_rate_drops": Setting(
            (),
            "shares of the rounds after each of which the rate falls to a tenth: .5,.75",
            per_phase=True,
            used_with=("optimizer", _OURS),
        ),
        "momentum": Setting(
            0.0,
            "of the clients' sgd or rmsprop",
            low=0,
            below=1,
            per_phase=True,
            sweepable=True,
            zero_is_special=True,
            tunable=True,
            used_with=("optimizer", ("sgd", "rmsprop")),
        ),
        "b1": Setting(
            0.9,
            "share of the first moment that adam and adamw keep in a step",
            low=0,
            below=1,
            per_phase=True,
            tunable=True,
            used_with=("optimizer", ("adam", "adamw")),
        ),
        "b2": Setting(
            float,
            "share of the second moment that is kept; unset: .999, with rmsprop .9",
            low=0,
            below=1,
            per_phase=True,
            tunable=True,
            used_with=("optimizer", ("adam", "adamw", "rmsprop")),
        ),
        "eps": Setting(
            float,
            "what is added to the second moment or its root, as optax does; unset: as optax does",
            above=0,
            per_phase=True,
            tunable=True,
            used_with=("optimizer", ("adam", "adamw", "adagrad", "rmsprop")),
        ),
        "keep_optimizer": Setting(
            False,
            "momentum and moments stay with a client; else each round begins anew",
            per_phase=True,
            tunable=True,
        ),
        "weight_decay": Setting(
            0.0,
            "so many times the parameters, added to the gradient by sgd, and by adamw to its step",
            low=0,
            per_phase=True,
            sweepable=True,
            zero_is_special=True,
            tunable=True,
            used_with=("optimizer", ("sgd", "adamw")),
        ),
        "decay_vectors": Setting(
            True,
            "whether vectors decay too: biases, and scale and shift of a normalisation",
            per_phase=True,
            tunable=True,
            used_with=("optimizer", ("sgd", "adamw")),
        ),
        "clip_norm": Setting(
            float,
            "largest norm of a gradient; unset: any",
            above=0,
            per_phase=True,
            sweepable=True,
            tunable=True,
        ),
    },
    "Uploads and the server": {
        "max_update_norm": Setting(
            float,
            "largest norm of what an upload changes: a larger one is rejected, as one that "
            "is not finite always is; unset: one whose squared norm overflows, from 1.8e19 on",
            above=0,
        ),
        "count_initial_download": Setting(True, "whether round 1's download is counted in bytes"),
    },
    "Evaluation": {
        "eval_every": Setting(5, "rounds between evaluations; a last round has one anyway", low=1),
        "evaluate_clients": Setting(
            int,
            "so many are evaluated, drawn by partition_seed from those who take part, the same "
            "ones always; unset: all, or of more than 10,000 half as many as visits in between",
            low=1,
            per_phase=True,
        ),
        "evaluate_after": Setting(
            True, "score each client's model after one more local training too, not only before"
        ),
        "validate_after": Setting(
            False, "choose a run's best round by the model after that training, not before it"
        ),
        "reference": Setting(
            False,
            "run Local and FedAvg on the same work too, and let the report say whether the "
            "method helped",
            resumable=True,
        ),
        "beside": Setting(
            "",
            "finished runs of the same work, directories separated by commas, with which the "
            "report compares; those of Local and FedAvg are also found by themselves",
            resumable=True,
        ),
        "tensorboard": Setting(False, "write an event file for TensorBoard too", resumable=True),
    },
    "Several runs": {
        "seed": Setting(
            0,
            "of all that is random in training: the first model, who is drawn, batches",
            low=0,
            budget=True,
        ),
        "seeds": Setting(
            1, "so many seeds, from `seed` on, as one program", low=1, high=1000, budget=True
        ),
        "sweep": Setting(
            "",
            "values of real-valued settings, all combinations as one program, where they are "
            "float32 and may round apart from a run of one: learning_rate=.1,.01; pfedla.rate=1,2",
        ),
    },
    "Memory and speed": {
        "checkpoint_every": Setting(
            int, "rounds between checkpoints; unset: by the clock", low=1, resumable=True
        ),
        "chunk": Setting(
            int,
            "clients that are computed together on a device; unset: 1 on a CPU, else all",
            low=1,
            resumable=True,
        ),
        "devices": Setting(
            int,
            "number of devices that clients are spread over; unset: all, on a CPU at most as many "
            "as clients in a round",
            low=1,
            resumable=True,
        ),
        "store": Setting(
            "auto",
            "where examples and state are kept: on every device; or, the state of clients, sharded "
            "over devices; or, what stays with clients, on the host or on disk, from where the "
            "cohort's is sent in each round; auto: the first of these that fits well",
            choices=STORES,
            resumable=True,
        ),
        "memory_gb": Setting(
            float,
            "GB of a device: chunk is chosen to fit, and a run that cannot is refused",
            above=0,
            resumable=True,
        ),
        "conv": Setting(
            "auto",
            "how convolutions are computed: auto, patches, rows, blocks, winograd or xla",
            choices=("auto", "patches", "rows", "blocks", "winograd", "xla"),
            resumable=True,
        ),
    },
}

for selectable in transforms.REGISTRY:
    GENERAL[selectable.title] |= selectable.settings
ROWS = {name: row for group in GENERAL.values() for name, row in group.items()}


def having(fact: str) -> tuple[str, ...]:
    """The names of the settings of whose rows something is true, in their order."""
    return tuple(name for name, row in ROWS.items() if getattr(row, fact))
