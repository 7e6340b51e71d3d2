"""The farm: plans, stages, Ray actors, scheduler, command line and reports. Holds no CUDA context."""
