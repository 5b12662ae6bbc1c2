"""Hydra configs: `--config-path=pkg://prefixflow_verl.configs --config-name=prefixflow_grpo`."""
