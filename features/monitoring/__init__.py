"""Monitoring: figures per layer, and alarms in generation."""

from thinker.runtime.registry import Feature

FEATURE = Feature(
    name="monitoring",
    keys={"train": "thinker.features.monitoring.keys:LayerLogKeys"},
    check_config="thinker.features.monitoring.keys:check_layer_log",
    callbacks="thinker.features.monitoring.layer_log:layer_logs",
    generator_options=("monitor",),
    observer="thinker.features.monitoring.monitor:make_observer",
    arguments={
        "generate": "thinker.features.monitoring.flags:GenerateFlags",
        "serve": "thinker.features.monitoring.flags:ServerFlags",
    },
    python_api=("thinker.features.monitoring.monitor:Monitor,Reference,load_monitor",),
)
