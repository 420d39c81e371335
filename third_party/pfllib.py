"""Options of PFLlib (TsingZ0/PFLlib) that both of its adapters set."""

_OFF = (
    "random_join_ratio",
    "few_shot",
    "time_select",
    "auto_break",
    "dlg_eval",
    "learning_rate_decay",
    "train_slow_rate",
    "send_slow_rate",
    "client_drop_rate",
    "num_new_clients",
    "fine_tuning_epoch_new",
)
OPTIONS = {
    **dict.fromkeys(_OFF, 0),
    "goal": "",
    "eval_gap": 1,
    "top_cnt": 1,
    "save_folder_name": "items",
    "time_threthold": 1e9,
    "batch_num_per_client": 1,
    "dlg_gap": 1,
    "learning_rate_decay_gamma": 1.0,
}
