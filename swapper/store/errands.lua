--[[
Errands, what is asked for by hand: appended to library.lua, whose text tells the layout, and loaded with it as one.

Invariant: an errand is written once and never changed; only a commit ends it.
]]

-- now id errand image (documents that lack the time, and their last brace) max_errands
-- An id that is known already gives the errand that has it.
local function errand(keys, a)
  local p, now, key = keys[1], clock(a[1]), keys[1] .. ':errand:' .. a[2]
  local known = redis.call('GET', key)
  if known then return { 'existing', known } end
  local open = redis.call('ZCARD', p .. ':errands')
  if open >= tonumber(a[5]) then return { 'full', int(open) } end
  local doc = a[3] .. ',"asked_ms":' .. int(now) .. '}'
  redis.call('SET', key, doc)
  redis.call('ZADD', p .. ':errands', int(redis.call('INCR', p .. ':asked')), a[2])
  emit(p, 'swap', a[2], '0', a[4] .. ',"started_ms":' .. int(now) .. ',"stage_ms":' .. int(now) .. '}')
  wake(p)
  return { 'created', doc }
end

redis.register_function('swapper_1_errand', errand)
