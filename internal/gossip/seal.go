// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package gossip

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// KeySize is the bytes of a key.
const KeySize = 32

// MaxKeys is how many keys a keyring holds.
const MaxKeys = 8

// Keyring is the keys that a fleet's processes share. One of them, the primary,
// seals what is sent; all of them open what comes in. It is safe for concurrent
// use, and a change counts from the next packet on. [NewKeyring] makes one.
//
// To change keys while the fleet runs: Add the new one everywhere, then Use it
// everywhere, then Remove the old one everywhere, each step only when the one
// before is done in every process.
type Keyring struct {
	mu   sync.Mutex // serializes changes
	keys atomic.Pointer[[]*key]
}

type key struct {
	secret [KeySize]byte
	block  cipher.Block
	k1     [aes.BlockSize]byte
}

// NewKeyring returns a keyring; the first key is the primary. The error is
// [ErrConfig] if there are none or more than [MaxKeys], or one has not [KeySize]
// bytes.
func NewKeyring(keys ...[]byte) (*Keyring, error) {
	r := &Keyring{}
	r.keys.Store(&[]*key{})
	if len(keys) == 0 {
		return nil, fmt.Errorf("%w: keyring: no key", ErrConfig)
	}
	var wrong []error
	for i, k := range keys {
		if err := r.Add(k); err != nil {
			wrong = append(wrong, fmt.Errorf("key %d: %w", i, err))
		}
	}
	if err := errors.Join(wrong...); err != nil {
		return nil, err
	}
	return r, nil
}

// Add has packets opened with a key too. A key that is there is left alone. The
// error is [ErrConfig].
func (r *Keyring) Add(secret []byte) error {
	if len(secret) != KeySize {
		return fmt.Errorf("%w: keyring: %d bytes are not %d", ErrConfig, len(secret), KeySize)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	old := *r.keys.Load()
	if find(old, secret) >= 0 {
		return nil
	}
	if len(old) == MaxKeys {
		return fmt.Errorf("%w: keyring: more than %d keys", ErrConfig, MaxKeys)
	}
	r.store(append(slices.Clip(old), newKey(secret)))
	return nil
}

// Use makes a key that is in the keyring the primary. The error is [ErrConfig].
func (r *Keyring) Use(secret []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := *r.keys.Load()
	i := find(old, secret)
	if i < 0 {
		return fmt.Errorf("%w: keyring: the key is not in it", ErrConfig)
	}
	keys := append([]*key{old[i]}, old[:i]...)
	r.store(append(keys, old[i+1:]...))
	return nil
}

// Remove takes a key out; one that is not there does not matter. The primary
// cannot be removed: that is [ErrConfig].
func (r *Keyring) Remove(secret []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	old := *r.keys.Load()
	switch i := find(old, secret); {
	case i == 0:
		return fmt.Errorf("%w: keyring: the primary key cannot be removed", ErrConfig)
	case i > 0:
		r.store(append(old[:i:i], old[i+1:]...))
	}
	return nil
}

// Fingerprints names the keys, the primary first, by the first eight bytes of
// their SHA-256: enough to compare two processes, of no use to open anything.
func (r *Keyring) Fingerprints() []string {
	var names []string
	for _, k := range *r.keys.Load() {
		sum := sha256.Sum256(k.secret[:])
		names = append(names, hex.EncodeToString(sum[:8]))
	}
	return names
}

func (r *Keyring) store(keys []*key) { r.keys.Store(&keys) }

func find(keys []*key, secret []byte) int {
	for i, k := range keys {
		if bytes.Equal(k.secret[:], secret) {
			return i
		}
	}
	return -1
}

func newKey(secret []byte) *key {
	k := &key{secret: [KeySize]byte(secret)}
	k.block, _ = aes.NewCipher(k.secret[:]) // fails for other sizes only
	k.block.Encrypt(k.k1[:], k.k1[:])
	carry := byte(0)
	for i := len(k.k1) - 1; i >= 0; i-- {
		k.k1[i], carry = k.k1[i]<<1|carry, k.k1[i]>>7
	}
	if carry != 0 {
		k.k1[len(k.k1)-1] ^= 0x87
	}
	return k
}

// derive is the key derivation of XAES-256-GCM (c2sp.org/XAES-256-GCM): the first
// half of a 24-byte nonce chooses a key for AES-256-GCM, the second half is its
// nonce.
func (k *key) derive(salt [saltSize]byte) cipher.AEAD {
	var sub [KeySize]byte
	for i := range 2 {
		m := sub[i*aes.BlockSize : (i+1)*aes.BlockSize]
		m[1], m[2] = byte(i+1), 'X'
		copy(m[4:], salt[:])
		for j := range m {
			m[j] ^= k.k1[j]
		}
		k.block.Encrypt(m, m)
	}
	block, _ := aes.NewCipher(sub[:])
	aead, _ := cipher.NewGCM(block) // fails for other block sizes only
	return aead
}

const (
	saltSize = 12
	seqSize  = 8
	tagSize  = 16
	sealed   = 0xE1 // first byte of what is sealed; the low four bits are the version

	// overhead is what sealing adds.
	overhead = 1 + saltSize + seqSize + tagSize
)

var errSeal = errors.New("gossip: not sealed with a key of ours")

// sealer seals what one incarnation sends and opens what it receives.
//
//	sealed (1) | salt (12) | sequence (8) | ciphertext | tag (16)
//
// It is XAES-256-GCM, whose nonce is the salt, four zeros and the sequence. The
// salt is random and this incarnation's own, the sequence counts: no nonce is used twice
// with a key, however many packets a fleet sends, as it could be with 96 random
// bits. And since the salt stays, the derived key is kept and sealing costs no
// more than AES-256-GCM does.
//
// A packet that is repeated is opened again. Whoever gets it must not mind: the
// session has its sequence numbers, membership its incarnations, and a stream of
// ours counts.
type sealer struct {
	ring *Keyring
	salt [saltSize]byte
	seq  atomic.Uint64
	mine atomic.Pointer[sealing]

	mu    sync.RWMutex
	opens map[[saltSize]byte]sealing // of the incarnations that were heard
	limit int
}

// sealing is a key, derived for a salt.
type sealing struct {
	*key
	cipher.AEAD
}

func newSealer(ring *Keyring, limit int) *sealer {
	s := &sealer{ring: ring, opens: map[[saltSize]byte]sealing{}, limit: limit}
	_, _ = rand.Read(s.salt[:]) // never fails
	return s
}

// seal appends packet to b, sealed. They must not overlap.
func (s *sealer) seal(b, packet []byte) []byte {
	primary := (*s.ring.keys.Load())[0]
	k := s.mine.Load()
	if k == nil || k.key != primary {
		k = &sealing{primary, primary.derive(s.salt)}
		s.mine.Store(k)
	}
	seq := s.seq.Add(1)
	b = append(b, sealed)
	b = append(b, s.salt[:]...)
	b = binary.BigEndian.AppendUint64(b, seq)
	nonce := nonces.Get().(*[saltSize]byte) //nolint:forcetypeassert // nothing else is put there
	binary.BigEndian.PutUint64(nonce[saltSize-seqSize:], seq)
	b = k.Seal(b, nonce[:], packet, nil)
	nonces.Put(nonce)
	return b
}

// nonces are arrays that would otherwise be allocated for each packet, since they
// are handed to an interface.
var nonces = sync.Pool{New: func() any { return new([saltSize]byte) }}

// open opens a packet into dst, which it overwrites; they must not overlap. The
// error is errSeal.
func (s *sealer) open(dst, b []byte) ([]byte, error) {
	if len(b) < overhead || b[0] != sealed {
		return nil, errSeal
	}
	salt := [saltSize]byte(b[1:])
	nonce := nonces.Get().(*[saltSize]byte) //nolint:forcetypeassert // nothing else is put there
	defer nonces.Put(nonce)
	copy(nonce[saltSize-seqSize:], b[1+saltSize:])
	text := b[1+saltSize+seqSize:]

	s.mu.RLock()
	known, ok := s.opens[salt]
	s.mu.RUnlock()
	keys := *s.ring.keys.Load()
	if ok && slices.Contains(keys, known.key) {
		if plain, err := known.Open(dst[:0], nonce[:], text, nil); err == nil {
			return plain, nil
		}
	}
	for _, k := range keys {
		if ok && k == known.key {
			continue
		}
		aead := k.derive(salt)
		if plain, err := aead.Open(dst[:0], nonce[:], text, nil); err == nil {
			s.keep(salt, sealing{k, aead})
			return plain, nil
		}
	}
	return nil, errSeal
}

func (s *sealer) keep(salt [saltSize]byte, k sealing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.opens) >= s.limit {
		clear(s.opens) // those that are still there come back with their next packet
	}
	s.opens[salt] = k
}
