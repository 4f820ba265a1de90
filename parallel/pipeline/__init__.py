"""Pipeline parallelism: schedules as tables, their check, and the runtime that executes them."""
