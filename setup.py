"""The package and what it needs. Tool settings are in pyproject.toml, the versions that are tested in constraints.txt.

Imports setuptools only. Every package is named here, so that a wheel holds what runs and never the tests or benchmarks;
`tests/test_packaging.py` compares the list with the directories. `scripts/lib/requirements.py` reads it too.
"""

from setuptools import setup

PACKAGES = [
    "kernels",
    "kernels.triton_ops",
    "parallel",
    "parallel.compression",
    "parallel.pipeline",
    "model",
    "data",
    "training",
    "tools",
    # Data only: an installed command finds configs/models/*.json beside its own package.
    "configs",
    "configs.deepspeed",
    "configs.models",
    "configs.runs",
]

INSTALL_REQUIRES = [
    "torch>=2.11",
    "deepspeed",
    "numpy",
    "pillow>=10.1",
    "PyYAML",
    "rich",
    "safetensors",
    "sentencepiece",
    "tensorboard",
    "tokenizers>=0.20",
    "tyro",
]

EXTRAS_REQUIRE = {
    "dev": [
        *("pytest>=8", "hypothesis", "ruff", "mypy", "transformers>=5", "megatron-core", "types-PyYAML"),
        "matplotlib",
        # Kernels are run by Triton's interpreter and compiled for GPUs that needn't be there.
        "triton; platform_system == 'Linux'",
    ],
    # Pictures of pipelines as PNG: tools/pipeline.py --png, --profile-pipeline.
    "plot": ["matplotlib"],
    # torch's CUDA build for Linux brings Triton by itself; its CPU build doesn't, and Triton's interpreter runs there.
    "gpu": ["triton; platform_system == 'Linux'"],
}

if __name__ == "__main__":
    setup(
        name="pretrain-deepseek",
        version="0.1.0",
        description="Pretrain DeepSeek-V2/V3 models with tensor, pipeline, data, expert and context parallelism",
        license="Apache-2.0",
        python_requires=">=3.10",
        packages=PACKAGES,
        package_data={
            "configs.deepspeed": ["*.json"],
            "configs.models": ["*.json"],
            "configs.runs": ["*.yaml"],
            "kernels": ["csrc/*"],
        },
        py_modules=["pretrain_deepseek"],
        install_requires=INSTALL_REQUIRES,
        extras_require=EXTRAS_REQUIRE,
    )
