/** The ids of our commands, apart from what they do: texts and buttons name them, too. */

export const IDS = {
  suspend: 'gpu-ckpt:suspend',
  checkpoint: 'gpu-ckpt:checkpoint',
  wake: 'gpu-ckpt:wake',
  save: 'gpu-ckpt:save',
  protect: 'gpu-ckpt:protect',
  explain: 'gpu-ckpt:explain',
  stay: 'gpu-ckpt:stay',
  keep: 'gpu-ckpt:keep'
} as const;
