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

// KeySize is the length of a key in bytes.
const KeySize = 32

// MaxKeys is the most keys that a keyring holds.
const MaxKeys = 8

// Keyring has the keys that a fleet's processes share. One of them, the primary, seals outgoing
// packets; all of them open incoming packets. It is safe for concurrent use, and a change counts
// from the next packet on. [NewKeyring] makes one.
//
// To change keys while the fleet runs: Add the new key in every process, then Use it in every
// process, then Remove the old key in every process. Begin a step only when the step before is done
// everywhere.
type Keyring struct {
	mu   sync.Mutex // serializes changes
	keys atomic.Pointer[[]*key]
}

type key struct {
	secret [KeySize]byte
	block  cipher.Block
	k1     [aes.BlockSize]byte
}

// NewKeyring returns a keyring whose primary is the first key. The error is [ErrConfig] if there is
// no key, if there are more than [MaxKeys], or if a key does not have [KeySize] bytes.
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

// Add adds a key that opens packets, if it is not there yet. The error is [ErrConfig].
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

// Remove removes a key; a key that is not there is no error. The primary cannot be removed: the
// error is then [ErrConfig].
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

// Fingerprints returns a name of each key, the primary first: the first eight bytes of its SHA-256.
// They are enough to compare two processes, and open nothing.
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
	sealed   = 0xE1 // first byte of a sealed packet; the low four bits are the version

	// overhead is the number of bytes that sealing adds.
	overhead = 1 + saltSize + seqSize + tagSize
)

var errSeal = errors.New("gossip: not sealed with a key of ours")

// sealer seals the packets that one incarnation sends and opens those that it receives.
//
//	sealed (1) | salt (12) | sequence (8) | ciphertext | tag (16)
//
// It is XAES-256-GCM. Its nonce is the salt, four zeros and the sequence. The salt is random and
// belongs to this incarnation; the sequence counts. So no nonce is used twice with a key, however
// many packets a fleet sends. With 96 random bits that could happen. Since the salt stays, the
// derived key is kept, and sealing costs no more than AES-256-GCM.
//
// A repeated packet is opened again. Its receiver must tolerate that: the session has sequence
// numbers, membership has incarnations, and our streams number their frames.
type sealer struct {
	ring *Keyring
	salt [saltSize]byte
	seq  atomic.Uint64
	mine atomic.Pointer[sealing]

	mu    sync.RWMutex
	opens map[[saltSize]byte]sealing // by salt, of incarnations that were heard
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

// nonces is a pool of arrays. Since they are passed to an interface, each packet would otherwise
// allocate one.
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
		clear(s.opens) // processes that still run come back with their next packet
	}
	s.opens[salt] = k
}
