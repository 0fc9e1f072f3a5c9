// SPDX-FileCopyrightText: The stormguard authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/sarama"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/rabbitmq/amqp091-go"

	"github.com/stormguard-mq/stormguard/internal/brokers"
)

// secrets are files for a broker with TLS, and for those who connect to it.
type secrets struct {
	ca              string // trusts cert
	strangers       string // trusts another
	cert, key       string // of 127.0.0.1, and of its clients
	both            string // key and certificate in one, as Kafka wants them
	password, wrong string
}

// What the password files say. SCRAM and JAAS give the commas a meaning.
const (
	rightPassword = "pass,word=1"
	wrongPassword = "s3cret"
)

func newSecrets(t *testing.T) secrets {
	t.Helper()
	var s secrets
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, key := selfSigned(t)
	s.ca, s.cert, s.key = write("ca.pem", cert), write("cert.pem", cert), write("key.pem", key)
	s.both = write("both.pem", append(slices.Clone(key), cert...))
	other, _ := selfSigned(t)
	s.strangers = write("strangers.pem", other)
	s.password, s.wrong = write("password", []byte(rightPassword+"\n")), write("wrong", []byte(wrongPassword+"\n"))
	return s
}

// selfSigned makes a certificate of 127.0.0.1 and its key, both PEM.
func selfSigned(t *testing.T) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "stormguard test " + rand.Text()[:8]},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
}

// try is a way to connect.
type try struct {
	name string
	args []string
	why  string // part of the error; empty: the broker lets it in
}

// tryDoctor runs the doctor each way. What it finds says that it was in.
func tryDoctor(t *testing.T, s secrets, look []string, found string, tries []try) {
	t.Helper()
	for _, c := range tries {
		t.Run(c.name, func(t *testing.T) {
			code, stdout, stderr := command(append(slices.Clone(look), c.args...)...)
			in := c.why == ""
			if in && (code != exitError || !strings.Contains(stdout, found)) || !in && (code != exitUnseen || stdout != "" || !strings.Contains(stderr, c.why)) {
				t.Errorf("%d %q %q", code, stdout, stderr)
			}
			if all := stdout + stderr; strings.Contains(all, rightPassword) || strings.Contains(all, wrongPassword) {
				t.Errorf("a password: %q", all)
			}
		})
	}
}

// tryDemo runs a short demo through TLS, with a user.
func tryDemo(t *testing.T, args ...string) {
	t.Helper()
	args = append([]string{"demo", "--json", "--rate", "100", "--outage", "1s", "--warmup", "500ms", "--after", "500ms"}, args...)
	code, stdout, stderr := command(args...)
	var result struct {
		Guarded struct{ Published, Handled, Lost int }
	}
	if err := json.Unmarshal([]byte(stdout), &result); err != nil || code != exitOK || result.Guarded.Published != 200 || result.Guarded.Lost != 0 {
		t.Errorf("%d %v %q %q", code, err, stdout, stderr)
	}
}

func TestSecureKafka(t *testing.T) { //nolint:tparallel // they share a broker
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a broker with TLS; run without -short")
	}
	s := newSecrets(t)
	const module = "org.apache.kafka.common.security."
	set := map[string]string{
		"listeners":                      "PLAINTEXT://127.0.0.1:{node1},CONTROLLER://127.0.0.1:{controller1},SASL_SSL://127.0.0.1:{both},SASL_PLAINTEXT://127.0.0.1:{sasl},SSL://127.0.0.1:{tls}",
		"advertised.listeners":           "PLAINTEXT://127.0.0.1:{node1},SASL_SSL://127.0.0.1:{both},SASL_PLAINTEXT://127.0.0.1:{sasl},SSL://127.0.0.1:{tls}",
		"listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,SSL:SSL",
		"ssl.keystore.type":              "PEM", "ssl.keystore.location": s.both,
		"ssl.truststore.type": "PEM", "ssl.truststore.location": s.ca,
		"listener.name.ssl.ssl.client.auth": "required",
		"sasl.enabled.mechanisms":           "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
	}
	for _, listener := range []string{"sasl_ssl", "sasl_plaintext"} {
		at := "listener.name." + listener + "."
		set[at+"plain.sasl.jaas.config"] = module + `plain.PlainLoginModule required user_bob="` + rightPassword + `";`
		set[at+"scram-sha-256.sasl.jaas.config"] = module + "scram.ScramLoginModule required;"
		set[at+"scram-sha-512.sasl.jaas.config"] = module + "scram.ScramLoginModule required;"
	}
	b := brokers.StartForTest(t, brokers.Kafka, brokers.Options{Set: set})
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	config := sarama.NewConfig()
	config.Version = sarama.V2_8_0_0
	config.Admin.Timeout = 30 * time.Second // of 3s a busy broker may need more
	admin, err := sarama.NewClusterAdmin([]string{b.Addr()}, config)
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Close()
	for _, mechanism := range []sarama.ScramMechanismType{sarama.SCRAM_MECHANISM_SHA_256, sarama.SCRAM_MECHANISM_SHA_512} {
		results, err := admin.UpsertUserScramCredentials([]sarama.AlterUserScramCredentialsUpsert{{
			Name: "bob", Mechanism: mechanism, Iterations: 4096, Salt: []byte(rand.Text()), Password: []byte(rightPassword),
		}})
		if err != nil || len(results) != 1 || results[0].ErrorCode != sarama.ErrNoError {
			t.Fatal(results, err)
		}
	}
	both, sasl, tls := "127.0.0.1:"+info["port_both"], "127.0.0.1:"+info["port_sasl"], "127.0.0.1:"+info["port_tls"]
	bob := []string{"--user", "bob", "--password-file", s.password, "--sasl"}
	with := slices.Concat[[]string]
	tryDoctor(t, s, []string{"doctor", "kafka", "--topic", "nobody"}, "topic nobody: it does not exist", []try{
		{"plain over tls", with(bob, []string{"plain", "--ca", s.ca, "--url", both}), ""},
		{"scram 256 over tls", with(bob, []string{"scram-sha-256", "--ca", s.ca, "--url", both}), ""},
		{"scram 512 over tls", with(bob, []string{"scram-sha-512", "--tls", "--ca", s.ca, "--url", both}), ""},
		{"plain without tls", with(bob, []string{"plain", "--url", sasl}), ""},
		{"scram 256 without tls", with(bob, []string{"scram-sha-256", "--url", sasl}), ""},
		{"scram 512 without tls", with(bob, []string{"scram-sha-512", "--url", sasl}), ""},
		{"a certificate", []string{"--ca", s.ca, "--cert", s.cert, "--key", s.key, "--url", tls}, ""},
		{"wrong password", []string{"--user", "bob", "--password-file", s.wrong, "--sasl", "scram-sha-512", "--ca", s.ca, "--url", both}, "Authentication failed"},
		{"wrong password, plain", []string{"--user", "bob", "--password-file", s.wrong, "--sasl", "plain", "--url", sasl}, "Authentication failed"},
		{"nobody", []string{"--ca", s.ca, "--url", both}, "it may want --tls"},
		{"another authority", with(bob, []string{"plain", "--ca", s.strangers, "--url", both}), "unknown authority"},
		{"the system's authorities", with(bob, []string{"plain", "--tls", "--url", both}), "unknown authority"},
		{"no certificate", []string{"--ca", s.ca, "--url", tls}, "bad certificate"},
		{"no tls", with(bob, []string{"plain", "--url", both}), "it may want --tls"},
	})
	tryDemo(t, with(bob, []string{"scram-sha-512", "--ca", s.ca, "--broker", "kafka", "--url", both})...)
}

func TestSecureRabbitMQ(t *testing.T) { //nolint:tparallel // they share a broker
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a broker with TLS; run without -short")
	}
	s := newSecrets(t)
	b := brokers.StartForTest(t, brokers.RabbitMQ, brokers.Options{Set: map[string]string{
		"listeners.ssl.1": "127.0.0.1:{tls}", "ssl_options.cacertfile": s.ca, "ssl_options.certfile": s.cert, "ssl_options.keyfile": s.key,
		"management.ssl.ip": "127.0.0.1", "management.ssl.port": "{https}",
		"management.ssl.cacertfile": s.ca, "management.ssl.certfile": s.cert, "management.ssl.keyfile": s.key,
	}})
	info, err := b.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"add_user", "bob", rightPassword}, {"set_user_tags", "bob", "monitoring"}, {"set_permissions", "bob", ".*", ".*", ".*"}} {
		if _, err := b.Ctl(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	conn, err := amqp091.Dial(b.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare("orders", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	url := "https://127.0.0.1:" + info["port_https"]
	bob := []string{"--user", "bob", "--password-file", s.password}
	tryDoctor(t, s, []string{"doctor", "rabbitmq", "--queue", "orders", "--url", url}, "queue /orders: it", []try{
		{"a user", append(slices.Clone(bob), "--ca", s.ca), ""},
		{"wrong password", []string{"--user", "bob", "--password-file", s.wrong, "--ca", s.ca}, "401"},
		{"nobody", []string{"--ca", s.ca}, "401"},
		{"another authority", append(slices.Clone(bob), "--ca", s.strangers), "unknown authority"},
		{"the system's authorities", bob, "unknown authority"},
	})
	tryDemo(t, append(slices.Clone(bob), "--ca", s.ca, "--broker", "rabbitmq", "--url", "amqps://127.0.0.1:"+info["port_tls"]+"/")...)
}

func TestSecureNATS(t *testing.T) { //nolint:tparallel // they share a broker
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a server with TLS; run without -short")
	}
	s := newSecrets(t)
	b := brokers.StartForTest(t, brokers.NATS, brokers.Options{Set: map[string]string{
		"tls":           `{cert_file: "` + s.cert + `", key_file: "` + s.key + `"}`,
		"authorization": `{user: bob, password: "` + rightPassword + `"}`,
	}})
	nc, err := nats.Connect(b.Addr(), nats.UserInfo("bob", rightPassword), nats.RootCAs(s.ca))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.CreateConsumer(t.Context(), jetstream.ConsumerConfig{Durable: "billing"}); err != nil {
		t.Fatal(err)
	}
	bob := []string{"--user", "bob", "--password-file", s.password}
	look := []string{"doctor", "nats", "--stream", "ORDERS", "--consumer", "billing", "--dlq", "NONE", "--url", b.Addr()}
	tryDoctor(t, s, look, "stream NONE: it does not exist", []try{
		{"a user", append(slices.Clone(bob), "--ca", s.ca), ""},
		{"wrong password", []string{"--user", "bob", "--password-file", s.wrong, "--ca", s.ca}, "Authorization Violation"},
		{"nobody", []string{"--ca", s.ca}, "Authorization Violation"},
		{"another authority", append(slices.Clone(bob), "--ca", s.strangers), "unknown authority"},
		{"the system's authorities", append(slices.Clone(bob), "--tls"), "unknown authority"},
	})
	tryDemo(t, append(slices.Clone(bob), "--ca", s.ca, "--url", b.Addr())...)
}
