--[[
Who obeys as an executor: appended to library.lua, whose text tells the layout, and loaded with it as one.

Invariant: an executor has one owner at a time, by the store's own clock; whoever else would be it waits for its end.
What only one of several processes may do (tell people what happened) is an executor as well.
]]

-- now executor owner who ttl
-- Taken by who had it last, or once it has ended. `floor` is the highest token there was when the owner last changed:
-- what was ordered until then is not the new owner's. No claim lies further ahead than it may last (a stepped clock).
local function claim(keys, a)
  local p, now, key = keys[1], clock(a[1]), keys[1] .. ':agent:' .. a[2]
  local had, longest = redis.call('HMGET', key, 'owner', 'who', 'ends', 'floor'), now + tonumber(a[5])
  local ends = math.min(tonumber(had[3] or '0'), longest)
  if had[1] and had[1] ~= a[3] and ends > now then
    redis.call('HSET', key, 'ends', int(ends))
    return { 'held', had[2], int(ends), int(ends - now) }
  end
  local floor = had[4]
  if had[1] ~= a[3] then floor = redis.call('GET', p .. ':token') or '0' end
  redis.call('HSET', key, 'owner', a[3], 'who', a[4], 'ends', int(longest), 'floor', floor)
  return { 'ok', floor }
end

-- executor owner
local function unclaim(keys, a)
  local key = keys[1] .. ':agent:' .. a[1]
  if redis.call('HGET', key, 'owner') == a[2] then redis.call('HSET', key, 'ends', '0') end
  return 'ok'
end

-- executor owner text
-- How far its owner has come, in its own words: whoever is the owner next goes on from there.
local function note(keys, a)
  local key = keys[1] .. ':agent:' .. a[1]
  if redis.call('HGET', key, 'owner') ~= a[2] then return 'lost' end
  redis.call('HSET', key, 'note', a[3])
  return 'ok'
end

redis.register_function('swapper_1_claim', claim)
redis.register_function('swapper_1_unclaim', unclaim)
redis.register_function('swapper_1_note', note)
