"""How the heavy parts are computed: functions of tensors, each with a plain equivalent that tests hold it against."""
