// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package ringbuf

// A lane's reserve is room of the shared budget that the lane has taken and does
// not use. What it frees goes into its reserve and what it places comes out of
// it, so the shared budget is touched once for many messages. It must not make
// the ring full below its bound, nor let it hold more:
//
//   - Ring.used counts the reserves, so used never passes the bound, and what is
//     held never passes used.
//   - Only lanes in Ring.reserves have one. A Put that finds too little room
//     raises Ring.reclaims, takes all reserves back and looks again before it
//     says so; so does Stats, which tells what is held. A Put that goes to sleep
//     raises Ring.asleep, takes all reserves back and offers what there is.
//   - A lane adds to its reserve under its lock, when it is in Ring.reserves and
//     after that has seen both flags down. A reclaim loads the entries and takes
//     the lanes' locks when its flag is up. So either the lane sees the flag, or
//     the reclaim sees the lane and has its lock afterwards: none is missed, and
//     none comes up again while the flag is up.
//   - While a Put waits that is not woken, asleep stays up: what is freed goes to
//     the shared budget, and from there to those who wait. A Put that is woken
//     looks, and so reclaims, by itself.
//   - A lane that ends gives its reserve back.

const (
	reserveLanes = 16  // lanes that may have a reserve
	reserveMost  = 128 // messages in a reserve
	reserveLeast = 8   // a ring that allows fewer than this has no reserves
	reservePart  = 2   // all reserves together are at most this part of the ring: a half
)

func (r *Ring[T]) setReserves() {
	if n := min(reserveMost, r.maxCount/(reservePart*reserveLanes)); n >= reserveLeast {
		r.reserveMax = pack(n, r.maxBytes/(reservePart*reserveLanes))
	}
}

// calm says whether a lane of Ring.reserves may add to its reserve. The caller
// holds the lane's lock, or the answer means nothing.
func (r *Ring[T]) calm() bool {
	return !r.asleep.Load() && r.reclaims.Load() == 0
}

// reclaim takes all reserves back. The caller holds no lock of a lane and has
// raised a flag: until that is down, no lane has a reserve again.
func (r *Ring[T]) reclaim() {
	for i := range r.reserves {
		if l := r.reserves[i].Load(); l != nil {
			l.mu.Lock()
			l.yieldLocked()
			l.mu.Unlock()
		}
	}
}

// yieldLocked gives the lane's reserve back, if it has one.
func (l *Lane[T]) yieldLocked() {
	if l.entry == 0 {
		return
	}
	r := l.ring
	r.used.Add(-l.reserve) // before the entry is free: who finds it so finds the room
	r.reserves[l.entry-1].Store(nil)
	r.crowded.Store(false)
	l.reserve, l.entry = 0, 0
}

// joinLocked gives the lane an entry in Ring.reserves, if one is free.
func (l *Lane[T]) joinLocked() bool {
	r := l.ring
	if r.reserveMax == 0 || r.crowded.Load() {
		return false
	}
	for i := range r.reserves {
		if r.reserves[i].CompareAndSwap(nil, l) {
			l.entry = i + 1
			return true
		}
	}
	r.crowded.Store(true)
	for i := range r.reserves {
		if r.reserves[i].Load() == nil { // its lane may have said so before the line above
			r.crowded.Store(false)
			break
		}
	}
	return false
}

// takeLocked reserves room for as many of p's first k messages, of size bytes,
// as fit, and returns how many those are and their bytes. Without p it is all or
// nothing.
func (l *Lane[T]) takeLocked(p *parcel[T], k int, size int64) (int, int64) {
	if need := pack(k, size); covers(l.reserve, need) {
		l.reserve -= need
		return k, size
	}
	r := l.ring
	more := uint64(0) // what the reserve should be afterwards
	if (l.entry != 0 || l.joinLocked()) && r.calm() {
		n := int(r.reserveMax>>bytesBits) / 2
		more = pack(n, min(size/int64(k)*int64(n), int64(r.reserveMax&maxBytes)/2))
	}
	for {
		u := r.used.Load()
		free := r.bound - (u - l.reserve)
		if need := pack(k, size); !covers(free, need) {
			if p == nil {
				return 0, 0
			}
			if k, size = p.fit(min(k, int(free>>bytesBits)), int64(free&maxBytes)); k == 0 {
				return 0, 0
			}
		}
		need := pack(k, size)
		if !covers(free-need, more) {
			more = 0
		}
		if r.used.CompareAndSwap(u, u-l.reserve+need+more) {
			l.reserve = more
			return k, size
		}
	}
}

// freeLocked gives room back, to the lane's reserve or to all. It runs under the
// lane's lock, so that nobody sees the lane without the messages and the ring
// still full of them. The caller calls Ring.wake once it has let go of the lock.
func (l *Lane[T]) freeLocked(n int, bytes int64) {
	r := l.ring
	freed := pack(n, bytes)
	if l.entry == 0 || !r.calm() {
		r.used.Add(-freed)
		return
	}
	l.reserve += freed
	if !covers(r.reserveMax, l.reserve) {
		l.trimLocked()
	}
}

// trimLocked gives back what is above half of the most that a reserve may be.
func (l *Lane[T]) trimLocked() {
	r, all := l.ring, l.reserve
	l.reserve = pack(
		min(int(all>>bytesBits), int(r.reserveMax>>bytesBits)/2),
		min(int64(all&maxBytes), int64(r.reserveMax&maxBytes)/2),
	)
	r.used.Add(l.reserve - all)
}

// Messages and bytes in one word, as Ring.used has them.
func pack(n int, bytes int64) uint64 { return uint64(n)<<bytesBits | uint64(bytes) }

// covers says whether room has need's messages and its bytes.
func covers(room, need uint64) bool {
	return room>>bytesBits >= need>>bytesBits && room&maxBytes >= need&maxBytes
}
