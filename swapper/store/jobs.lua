--[[
Jobs: appended to library.lua, whose text tells the layout, and loaded with it as one.

  P:job:ID          hash doc, v                             P:jobs       zset created_ms: every job there is
  P:jobs:over       zset ended_ms: the ended ones, 1,000 kept

Invariant: a job is written by who has read its newest version, or not at all; one that has ended stays as it is.
]]

local JOBS = 1000

-- id version created_ms ended_ms ('' while it lasts) doc -> 'ok' or 'conflict', the version it has now
local function put_job(keys, a)
  local p, id, expected = keys[1], a[1], tonumber(a[2])
  local key = p .. ':job:' .. id
  local version = tonumber(redis.call('HGET', key, 'v') or '0')
  if version ~= expected or redis.call('ZSCORE', p .. ':jobs:over', id) then return { 'conflict', int(version) } end
  redis.call('HSET', key, 'doc', a[5], 'v', int(version + 1))
  redis.call('ZADD', p .. ':jobs', a[3], id)
  if a[4] ~= '' then
    redis.call('ZADD', p .. ':jobs:over', a[4], id)
    for _, old in ipairs(redis.call('ZRANGE', p .. ':jobs:over', 0, -JOBS - 1)) do
      redis.call('DEL', p .. ':job:' .. old)
      redis.call('ZREM', p .. ':jobs', old)
      redis.call('ZREM', p .. ':jobs:over', old)
    end
  end
  emit(p, 'job', id, int(version + 1), a[5])
  return { 'ok', int(version + 1) }
end

-- id -> its document or nil
local function job(keys, a)
  return redis.call('HGET', keys[1] .. ':job:' .. a[1], 'doc')
end

-- limit open ('1': only those that have not ended) -> documents, newest first
local function jobs(keys, a)
  local p, found = keys[1], {}
  for _, id in ipairs(redis.call('ZREVRANGE', p .. ':jobs', 0, -1)) do
    if #found == tonumber(a[1]) then break end
    if a[2] ~= '1' or not redis.call('ZSCORE', p .. ':jobs:over', id) then
      local doc = redis.call('HGET', p .. ':job:' .. id, 'doc')
      if doc then found[#found + 1] = doc end
    end
  end
  return found
end

redis.register_function('swapper_1_put_job', put_job)
redis.register_function({ function_name = 'swapper_1_job', callback = job, flags = { 'no-writes' } })
redis.register_function({ function_name = 'swapper_1_jobs', callback = jobs, flags = { 'no-writes' } })
