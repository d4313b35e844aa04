"""What we name of transformers, each from the module that it is in, with its own types. The library's ``__init__`` has
checkers read every model that there is, some 2,700 files. A name that is new in our code is added here."""

from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PreTrainedConfig as PreTrainedConfig
from transformers.generation.configuration_utils import (
    ContinuousBatchingConfig as ContinuousBatchingConfig,
)
from transformers.generation.configuration_utils import (
    GenerationConfig as GenerationConfig,
)
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM as AutoModelForCausalLM,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForImageTextToText as AutoModelForImageTextToText,
)
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config as DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM as DeepseekV3ForCausalLM
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig as Gemma3TextConfig
from transformers.models.glm4_moe.configuration_glm4_moe import Glm4MoeConfig as Glm4MoeConfig
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.lfm2.configuration_lfm2 import Lfm2Config as Lfm2Config
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mamba.configuration_mamba import MambaConfig as MambaConfig
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig as MixtralConfig
from transformers.models.phi3.configuration_phi3 import Phi3Config as Phi3Config
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig as Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VLForConditionalGeneration as Qwen2_5_VLForConditionalGeneration,
)
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForCausalLM as Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3ForSequenceClassification as Qwen3ForSequenceClassification,
)
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig as Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM as Qwen3MoeForCausalLM
from transformers.models.stablelm.configuration_stablelm import StableLmConfig as StableLmConfig
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
from transformers.trainer_callback import TrainerCallback as TrainerCallback
