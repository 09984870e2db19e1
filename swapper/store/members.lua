--[[
Which gateways there are, and what waits at each: appended to library.lua, whose text tells the layout, and loaded with
it as one.

Invariant: a gateway is a member until its last beat ends, by the store's own clock; what waits at it vanishes with it.
]]

-- now gateway demand (a document) ttl
local function beat(keys, a)
  local p, now, gateway = keys[1], clock(a[1]), a[2]
  local ends = redis.call('ZSCORE', p .. ':gateways', gateway)
  for _, dead in ipairs(redis.call('ZRANGEBYSCORE', p .. ':gateways', '-inf', int(now), 'LIMIT', 0, 100)) do
    redis.call('ZREM', p .. ':gateways', dead)
    redis.call('HDEL', p .. ':demand', dead)
  end
  local before = redis.call('HGET', p .. ':demand', gateway)
  redis.call('ZADD', p .. ':gateways', int(now + tonumber(a[4])), gateway)
  if before ~= a[3] then
    redis.call('HSET', p .. ':demand', gateway, a[3])
    wake(p)
  end
  return ends and tonumber(ends) > now and 'ok' or 'joined'
end

-- gateway
local function leave(keys, a)
  local p = keys[1]
  redis.call('HDEL', p .. ':demand', a[1])
  if redis.call('ZREM', p .. ':gateways', a[1]) == 1 then wake(p) end
  redis.call('DEL', p .. ':out:gateway:' .. a[1])
  return 'ok'
end

redis.register_function('swapper_1_beat', beat)
redis.register_function('swapper_1_leave', leave)
